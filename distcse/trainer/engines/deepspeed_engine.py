"""The DeepSpeed engine: ZeRO 0 to 3, accumulation and clipping by DeepSpeed; checkpoints in distcse's own form."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from distcse.recipe import LoopSection, decided
from distcse.trainer.checkpoints import ModelState
from distcse.trainer.distributed import world_size
from distcse.trainer.engines.engine import trained_parameters
from distcse.trainer.engines.fused_adamw import MOMENTS, make_adamw


class DeepSpeedEngine:
    """Wraps `deepspeed.initialize`. Needs torch.distributed up; opens a group of one where there is none."""

    def __init__(self, model: nn.Module, training: LoopSection, rows: int, restored: ModelState | None) -> None:
        self._owns_group = _open_group_of_one()
        deepspeed = _quiet_deepspeed()
        self._deepspeed = deepspeed
        self._stage = training.zero_stage
        self._parameters = trained_parameters(model)
        optimizer = make_adamw(self._parameters.values(), training)
        if torch.cuda.is_available():  # DeepSpeed takes this for the GPU's number, and two workers may be on one
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
        self._linear = nn.functional.linear  # ZeRO 3 puts its own in its place, for the whole process
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_config(training, rows)
        )
        self.device: torch.device = self._engine.device
        self._updates = 0
        if self._stage:
            self._open_partitioned_state(restored.updates if restored is not None else 0)
        if restored is not None:
            self._restore(restored)

    def forward(self, inputs: Any) -> Any:
        return self._engine(inputs)

    def backward(self, share: Tensor) -> None:
        # DeepSpeed averages over workers; shares add up. It divides by the accumulation itself.
        self._engine.backward(share * world_size())

    def step(self, lr: float | Tensor) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        moves = self._engine.is_gradient_accumulation_boundary()
        self._engine.step()
        self._updates += moves

    def state(self) -> ModelState:
        with self._gathered():
            found = {name: tensor.detach().cpu() for name, tensor in self._engine.module.state_dict().items()}
            weights = {name: t.clone() for name, t in found.items()} if self._stage == 3 else found
        moments = {name: self._moments(p) for name, p in self._parameters.items()} if self._updates else {}
        return ModelState(weights, moments, self._updates)

    def close(self) -> None:
        self._engine.destroy()
        nn.functional.linear = self._linear
        if self._owns_group:
            # Not torch's own: DeepSpeed keeps a second record of the group, and the next engine would trip over it.
            self._deepspeed.comm.destroy_process_group()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        if self._stage < 3:
            yield
        else:
            with self._deepspeed.zero.GatheredParameters(list(self._engine.module.parameters())):
                yield

    def _moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if self._stage == 0:
            state = self._optimizer.state[parameter]
            return {kind: state[kind].cpu() for kind in MOMENTS}
        from deepspeed.utils import safe_get_full_optimizer_state

        return {kind: safe_get_full_optimizer_state(parameter, kind).cpu().clone() for kind in MOMENTS}

    def _restore(self, restored: ModelState) -> None:
        """Weights came with the model; AdamW's moments and count are put where this stage keeps them."""
        self._updates = restored.updates
        if not restored.moments:
            return
        if self._stage == 0:
            for name, parameter in self._parameters.items():
                moments = {kind: t.to(self.device) for kind, t in restored.moments[name].items()}
                self._optimizer.state[parameter] = {"step": _count(restored.updates, self.device), **moments}
            return
        from deepspeed.utils import safe_set_full_optimizer_state

        for name, parameter in self._parameters.items():
            for kind in MOMENTS:
                safe_set_full_optimizer_state(parameter, restored.moments[name][kind].to(self.device), kind)

    def _open_partitioned_state(self, updates: int) -> None:
        """ZeRO fills AdamW's state at its first step, and then finds that of the first of its groups alone.

        A resumed run needs it before, to have something to write into.
        """
        inner = self._optimizer.optimizer
        flats = (
            self._optimizer.single_partition_of_fp32_groups
            if self._stage < 3
            else self._optimizer.fp32_partitioned_groups_flat
        )
        for flat in flats:
            inner.state[flat] = {
                "step": _count(updates, flat.device),
                **{kind: torch.zeros_like(flat) for kind in MOMENTS},
            }
        if self._stage < 3:
            self._optimizer._lazy_init_hp_params_optimizer_state()


def _config(training: LoopSection, rows: int) -> dict[str, Any]:
    given = training.deepspeed or {}
    config: dict[str, Any] = {
        "steps_per_print": 10**9,
        **given,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": training.gradient_accumulation,
        # Said even when it is 0: DeepSpeed's own default is 1.0.
        "gradient_clipping": training.gradient_clipping,
        "zero_optimization": {**given.get("zero_optimization", {}), "stage": training.zero_stage},
        "zero_allow_untested_optimizer": True,
    }
    if decided(training.precision) == "bf16":
        # Autocast, not DeepSpeed's bf16 mode: parameters stay float32, as in the plain engine and in what is saved.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config


def _count(updates: int, device: torch.device) -> Tensor:
    return torch.tensor(float(updates), device=None if device.type == "cpu" else device)


def _open_group_of_one() -> bool:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    if dist.is_initialized():
        return False
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return True


def _quiet_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # ZeRO-3 calls a deprecated collective every step; the line says nothing to a user.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed.*")
    import deepspeed

    if not torch.cuda.is_available():
        # No compiler is asked for: the one op it would build on a CPU serves inference only.
        deepspeed.ops.__compatible_ops__ = {}
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed
