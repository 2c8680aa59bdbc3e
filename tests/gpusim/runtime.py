"""The device type `gpu`: its module `torch.gpu`, its registration, and the context manager that makes it available."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.checkpoint import DefaultDeviceType

from tests.gpusim import streams
from tests.gpusim.autocast import register_autocast
from tests.gpusim.graphs import CUDAGraph, graph
from tests.gpusim.simulation import GENERATOR, Simulation, activated, active, is_active
from tests.gpusim.tensor import run

_FACTORIES = (
    *("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step"),
    *("linspace", "eye", "eye.m", "randperm"),
)
"""Operations that create a tensor without another one; PyTorch builds all others of these."""
_libraries: list[torch.library.Library] = []  # a library's registrations end with it


class GpuModule:
    """`torch.gpu`: the part of `torch.cuda` that code for any accelerator uses."""

    OutOfMemoryError = torch.OutOfMemoryError
    default_generators = (GENERATOR,)
    Stream = streams.Stream
    Event = streams.Event
    CUDAGraph = CUDAGraph
    graph = staticmethod(graph)
    stream = staticmethod(streams.use_stream)
    set_stream = staticmethod(streams.set_stream)
    current_stream = staticmethod(streams.current_stream)
    default_stream = staticmethod(streams.default_stream)

    def is_available(self) -> bool:
        return is_active()

    def is_initialized(self) -> bool:
        return is_active()

    def device_count(self) -> int:
        return int(is_active())

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def get_device_name(self, device: Any = None) -> str:
        return "Simulated GPU"

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return (9, 0)

    def get_device_properties(self, device: Any = None) -> Any:
        major, minor = self.get_device_capability()
        return SimpleNamespace(
            name=self.get_device_name(),
            total_memory=active().total_bytes,
            major=major,
            minor=minor,
            multi_processor_count=132,
        )

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        if not is_active():  # PyTorch's profiler calls it, whatever is profiled
            return
        active().wait("synchronize")
        streams.default_stream().finish()
        streams.current_stream().finish()

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return active().total_bytes - active().allocated_bytes, active().total_bytes

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        active().memory_fraction = fraction

    def memory_allocated(self, device: Any = None) -> int:
        return active().allocated_bytes

    def empty_cache(self) -> None:
        """Do nothing: memory is not cached."""

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 1)

    def manual_seed_all(self, seed: int) -> None:
        if is_active() and active().is_recording():
            raise RuntimeError("operation not permitted when stream is capturing: a seed")
        GENERATOR.manual_seed(seed)

    def get_rng_state(self, device: Any = None) -> Tensor:
        return GENERATOR.state.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        GENERATOR.state.set_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False


def _register() -> None:
    """Register the device type with PyTorch, once for the process."""
    if _libraries:
        return
    torch.ones((), requires_grad=True).backward()  # fixes the engine's threads, before there is a device for one
    _setup_privateuseone_for_python_backend("gpu", backend_module=GpuModule())
    library, fallback = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    _libraries.extend((library, fallback))
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, functools.partial(run, operation), "PrivateUse1")
    library.impl("_copy_from", functools.partial(run, torch.ops.aten._copy_from.default), "PrivateUse1")
    register_autocast(library, fallback)


@contextmanager
def simulated(total_bytes: int = 80 * 2**30) -> Iterator[Simulation]:
    """Context manager: give this process one simulated GPU.

    Args:
        total_bytes: Memory of the device.
    """
    _register()
    simulation = Simulation(total_bytes)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (
            torch.Tensor,
            "pin_memory",
            lambda tensor, device=None: tensor if streams.is_pinned(tensor) else streams.pin(tensor.clone()),
        ),
        (torch.Tensor, "is_pinned", lambda tensor, device=None: streams.is_pinned(tensor)),
        (torch.autograd, "_engine_run_backward", _backward_pass),
        # Its tensors have no version counter, which those of a Python device must have.
        (torch._C, "_InferenceMode", lambda mode: torch.no_grad() if mode else nullcontext()),
        *((torch, name, _pinning(getattr(torch, name))) for name in ("empty", "empty_like", "zeros", "full")),
    ]
    with ExitStack() as stack:
        stack.enter_context(activated(simulation))
        # Recomputation restores the autocast of this device type, which PyTorch reads from the accelerator once per process.
        stack.enter_context(mock.patch.object(DefaultDeviceType, "_default_device_type", "gpu"))
        for place, name, replacement in patches:
            stack.enter_context(mock.patch.object(place, name, replacement))
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        torch.__future__.set_swap_module_params_on_conversion(True)  # as on CUDA, `module.to` keeps its parameters
        stack.callback(streams.default_stream().copies.clear)
        yield simulation


_run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]


def _backward_pass(*args: Any, **kwargs: Any) -> Any:
    # Without a thread per device: PyTorch fixes these in a process's first backward pass, and processes forked later hang.
    has_thread: bool = torch._C._is_multithreading_enabled()  # type: ignore[attr-defined]
    with active().backward_pass(has_thread), torch.autograd.set_multithreading_enabled(False):
        return _run_backward(*args, **kwargs)


def _pinning(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = factory(*args, **kwargs)
        return streams.pin(made) if pin_memory else made

    return make
