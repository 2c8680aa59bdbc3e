"""Private and undocumented names of DeepSpeed. Tried with deepspeed 0.19.8; pyproject.toml allows 0.19."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def require_no_compiler(deepspeed: Any) -> None:
    """Declare that this machine can build no op of DeepSpeed, so that `import` and `initialize` need no compiler.

    Private: `deepspeed.ops.__compatible_ops__`. The environment variables of `DS_BUILD_…` select ops when DeepSpeed is
    installed; at run time there is none.
    """
    deepspeed.ops.__compatible_ops__ = {}


def create_optimizer_state(optimizer: Any, stage: int, state_of: Callable[[Any], dict[str, Any]]) -> None:
    """Create the inner optimizer's state of all partitions before the first step.

    Undocumented: the attributes of ZeRO's optimizers with the fp32 partitions; private:
    `_lazy_init_hp_params_optimizer_state`, which makes the state readable by `safe_get_full_optimizer_state` (stages 1 and 2).
    ZeRO itself creates the state in the first step. `engine.load_checkpoint` creates it earlier, but only from DeepSpeed's own
    checkpoints, which are pickled.

    Args:
        optimizer: The optimizer that `deepspeed.initialize` returned.
        stage: ZeRO stage, 1 to 3.
        state_of: Returns the state of a flat fp32 partition.
    """
    flats = optimizer.single_partition_of_fp32_groups if stage < 3 else optimizer.fp32_partitioned_groups_flat
    for flat in flats:
        optimizer.optimizer.state[flat] = state_of(flat)
    if stage < 3:
        optimizer._lazy_init_hp_params_optimizer_state()
