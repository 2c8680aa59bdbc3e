"""The DeepSpeed engine: ZeRO 0 to 3, with accumulation and clipping by DeepSpeed, and checkpoints in distcse's format."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from distcse.compat import create_optimizer_state, require_no_compiler
from distcse.devices.device import default_device, gpu_module, has_gpu
from distcse.devices.distributed import rank, world_size
from distcse.devices.host import restore_variables
from distcse.recipe import LoopSection, decided
from distcse.training.checkpoint_files import WEIGHTS, ModelState
from distcse.training.engines.fused_adamw import MOMENTS, make_adamw, trained_parameters
from distcse.training.snapshot import Entry, Snapshot, entries_of, take_snapshot


class DeepSpeedEngine:
    """Trains with `deepspeed.initialize`. It creates a process group with one rank if there is none."""

    def __init__(self, model: nn.Module, training: LoopSection, rows: int, restored: ModelState | None) -> None:
        self._owns_group = _open_group_of_one()
        deepspeed = _quiet_deepspeed()
        self._deepspeed = deepspeed
        self._stage = training.zero_stage
        self._parameters = trained_parameters(model)
        optimizer = make_adamw(self._parameters.values(), training)
        self._linear = nn.functional.linear  # ZeRO 3 replaces it in the entire process
        has_scalars = any(not parameter.ndim for parameter in self._parameters.values())
        self._for_scalars: AbstractContextManager[Any] = _ForScalars() if has_scalars else nullcontext()
        self._variables = _set_variables_of_rank()
        try:
            with self._for_scalars:
                self._engine, self._optimizer, _, _ = deepspeed.initialize(
                    model=model, optimizer=optimizer, config=deepspeed_config(training, rows)
                )
        finally:
            if self._stage < 3:  # ZeRO 3 reads them in each forward pass
                restore_variables(self._variables)
        self.device: torch.device = self._engine.device
        self._updates = 0
        if self._stage:
            self._open_partitioned_state(restored.updates if restored is not None else 0)
        if restored is not None:
            self._restore(restored)

    def forward(self, inputs: object) -> Any:
        return self._engine(inputs)

    def backward(self, share: Tensor) -> None:
        # DeepSpeed averages over workers, but shares must be summed. It divides by the accumulation steps itself.
        self._engine.backward(share * world_size())

    def step(self, lr: float | Tensor) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        is_update = self._engine.is_gradient_accumulation_boundary()
        with self._for_scalars:
            self._engine.step()
        self._updates += is_update

    def snapshot(self) -> Snapshot | None:
        updates = torch.full((), float(self._updates), device=self.device)
        if self._stage:
            entries = self._gather_entries()
            try:
                return take_snapshot(entries, updates, self.device) if rank() == 0 else None
            finally:
                for _ in entries:  # take part in gathering, also after an error
                    pass
        if rank() > 0:  # all ranks have the same state
            return None
        state, trained = self._optimizer.state, self._parameters.items() if self._updates else ()
        moments = {name: {kind: state[parameter][kind] for kind in MOMENTS} for name, parameter in trained}
        return take_snapshot(entries_of(self._engine.module, moments), updates, self.device)

    def close(self) -> None:
        self._engine.destroy()
        if self._stage == 3:
            restore_variables(self._variables)
        nn.functional.linear = self._linear
        if self._owns_group:
            # Not torch's function: DeepSpeed has a second record of the group, which would break the next engine.
            self._deepspeed.comm.destroy_process_group()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        if self._stage < 3:
            yield
        else:
            with self._deepspeed.zero.GatheredParameters(list(self._engine.module.parameters())):
                yield

    def _gather_entries(self) -> Iterator[Entry]:
        """Gather weights and moments, one after the other, so that a GPU holds few full moments at once."""
        from deepspeed.utils import safe_get_full_optimizer_state

        with self._gathered():
            for name, tensor in self._engine.module.state_dict().items():
                yield WEIGHTS, name, tensor.clone() if self._stage == 3 else tensor
        for name, parameter in self._parameters.items() if self._updates else ():
            for kind in MOMENTS:
                yield kind, name, safe_get_full_optimizer_state(parameter, kind).clone()

    def _restore(self, restored: ModelState) -> None:
        """Restore AdamW's moments and update count; the model's weights are already restored."""
        self._updates = restored.updates
        if not restored.moments:
            return
        if self._stage == 0:
            for name, parameter in self._parameters.items():
                moments = {kind: t.to(self.device) for kind, t in restored.moments[name].items()}
                self._optimizer.state[parameter] = {"step": _step_count(restored.updates, self.device), **moments}
            return
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, parameter in self._parameters.items():
            for kind in MOMENTS:
                safe_set_full_optimizer_state(parameter, restored.moments[name][kind].to(self.device), kind)

    def _open_partitioned_state(self, updates: int) -> None:
        """Create AdamW's state for ZeRO, so that a resumed run can write moments into it before the first step.

        ZeRO itself would create it in the first step, and then only find the state of its first parameter group.
        """

        def empty_state(flat: Tensor) -> dict[str, Tensor]:
            moments = {kind: torch.zeros_like(flat) for kind in MOMENTS}
            return {"step": _step_count(updates, flat.device), **moments}

        create_optimizer_state(self._optimizer, self._stage, empty_state)


class _ForScalars(TorchFunctionMode):
    """Lets DeepSpeed train scalar parameters, such as a learned temperature, with two calls that PyTorch refuses for scalars.

    `initialize` views each parameter as bytes to broadcast it; clipping multiplies each gradient by a vector of one number.
    """

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is torch.Tensor.view and not arguments[0].ndim and isinstance(arguments[1], torch.dtype):
            return arguments[0].view(1).view(arguments[1])
        if function is torch.Tensor.mul_ and not arguments[0].ndim and isinstance(arguments[1], Tensor):
            return arguments[0].mul_(arguments[1].view(()))
        return function(*arguments, **(keywords or {}))


def deepspeed_config(training: LoopSection, rows: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration: the recipe's own, completed by the training section."""
    user_config = training.deepspeed or {}
    # At stage 0, DeepSpeed sums the gradients after the backward pass.
    overlap = {"overlap_comm": True} if training.zero_stage and has_gpu() else {}
    config: dict[str, Any] = {
        "steps_per_print": 10**9,
        **user_config,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": training.gradient_accumulation,
        # Also passed when it is 0, because DeepSpeed's default is 1.0.
        "gradient_clipping": training.gradient_clipping,
        "zero_optimization": {**overlap, **user_config.get("zero_optimization", {}), "stage": training.zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    if decided(training.precision) == "bf16":
        # Autocast instead of DeepSpeed's bf16 mode: parameters stay float32, as in TorchEngine and in checkpoints.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config


def _step_count(updates: int, device: torch.device) -> Tensor:
    return torch.tensor(float(updates), device=None if device.type == "cpu" else device)


def _set_variables_of_rank() -> dict[str, str | None]:
    """Set the variables of a launcher that DeepSpeed reads, and return what they were.

    If they stayed, accelerate would look for the launcher. mpirun may have started this process or Ray: DeepSpeed compares its
    variable with LOCAL_RANK, which Ray Train sets.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    before = {name: os.environ.get(name) for name in names}
    os.environ.pop("OMPI_COMM_WORLD_LOCAL_RANK", None)
    os.environ.setdefault("LOCAL_RANK", "0")
    if has_gpu():  # DeepSpeed uses it as the GPU's index, and two workers can share a GPU
        os.environ["LOCAL_RANK"] = str(gpu_module(default_device()).current_device())
    os.environ.update(RANK=str(rank()), WORLD_SIZE=str(world_size()))
    return before


def _open_group_of_one() -> bool:
    if dist.is_initialized():
        return False
    backend = "nccl" if has_gpu() else "gloo"
    show_error = sys.excepthook
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    sys.excepthook = show_error  # torch's prints "[rank0]:" before each line, of the caller's own errors too
    return True


def _quiet_deepspeed() -> Any:
    if not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # ZeRO-3 calls a deprecated collective in every step, which users cannot change.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    import deepspeed

    if not has_gpu():
        require_no_compiler(deepspeed)  # the only op that DeepSpeed would build on a CPU is for inference
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
