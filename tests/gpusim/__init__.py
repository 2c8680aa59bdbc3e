"""A simulated GPU for tests: its numbers are computed on the CPU, its rules are those of a GPU.

Inside `with simulated() as gpu`, PyTorch has an accelerator of type `gpu`, and `distcse.devices.device` finds it as `cuda`:

- An operation on tensors of different devices raises, as on a GPU.
- Everything for which the host would wait for the device is counted in `gpu.waits` by kind, file and line.
- `torch.autocast("gpu")` casts the operations that it casts on CUDA.
- Copies between pinned memory and the device are asynchronous. Memory that the host reads too early holds NaN or the smallest
  integer, and memory that it overwrites too early raises (`streams.py`).
- `CUDAGraph` records a tape of operations and replays it. While it records, a wait, a seed, a collective or a pinned allocation
  raises, and the thread that began it has to end it.
- Several processes have a device each; gloo's collectives send the numbers of its tensors.
- The device has its own random generator, a limited memory and `torch.OutOfMemoryError`, which a test can cause.

Not simulated: several devices of one process, kernels that run while the host continues, and the time that anything takes.

The first call of `simulated` registers the device type for the rest of the process. Outside of it,
`torch.accelerator.is_available()` is False, and nothing else changes.
"""

from tests.gpusim.runtime import simulated
from tests.gpusim.simulation import Simulation

__all__ = ["Simulation", "simulated"]
