"""Private and undocumented names of other libraries; no other package uses such names.

Each function says why the public API is not enough. `tests/unit/test_compat.py` fails if a new version of a library moves a
name. Those of PyTorch are in `compat.torch`; here, nothing is imported until a function is called. Ray's names are in
`distcse.cluster.versions`. Tried with datasets 5.2.0, deepspeed 0.19.8, model2vec 0.10.0 and transformers 5.23.0; pyproject.toml
has the versions that are allowed.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def is_packaged_reader(name: str) -> bool:
    """Return whether `datasets` loads a name, such as `text`, with a packaged reader, from files in the working directory.

    Private: `datasets.packaged_modules._PACKAGED_DATASETS_MODULES`, in which `load_dataset` looks a name up first.
    """
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    return name in _PACKAGED_DATASETS_MODULES


def split_fingerprint(split: Any) -> str:
    """Return the fingerprint of a loaded split: it changes with its content, and is known without reading it.

    Private: `Dataset._fingerprint`, which `datasets` keys its own cache with. `Dataset.info` has checksums of downloaded files
    only, and a folder of `save_to_disk` has none.
    """
    return str(split._fingerprint)


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


@contextmanager
def following_steps(on_step: Callable[[], None]) -> Iterator[None]:
    """Train without model2vec's progress bars, in this process, and call `on_step` before each step.

    Undocumented: that `model2vec.train.trainer` has tqdm's bar under this name. The trainer has no argument for it, and
    `TQDM_DISABLE` is read when tqdm is imported.
    """
    from model2vec.train import trainer

    shown = trainer.tqdm

    class Steps(shown):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{**settings, "disable": True})

        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                on_step()
                yield batch

    trainer.tqdm = Steps
    try:
        yield
    finally:
        trainer.tqdm = shown


def attention_implementation(config: Any) -> str | None:
    """Return the attention that a loaded model computes: `eager`, `sdpa` or another.

    Private: `PretrainedConfig._attn_implementation`. `attn_implementation` is an argument of `from_pretrained`, and nothing
    public says what its default was resolved to.
    """
    chosen: str | None = config._attn_implementation
    return chosen


@contextmanager
def without_noise() -> Iterator[None]:
    """Silence warnings and progress bars of transformers while a model is loaded or saved; also a decorator.

    Its load reports advise to train, and name weights that are not used here. `load_backbone` logs those that matter.
    """
    from transformers.utils import logging as library

    verbosity = library.get_verbosity()
    library.disable_progress_bar()
    library.set_verbosity(max(verbosity, logging.ERROR))
    try:
        yield
    finally:
        library.set_verbosity(verbosity)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_NETWORK = {"ConnectionError", "TimeoutError", "Timeout", "TransportError"}
"""Classes of the standard library, of requests and of httpx, one of which every error of the network has as a base."""


def fix_of_hub_error(error: BaseException, without_network: str, access: str = "a private model") -> str:
    """Return the imperative fix of an error of the hub's client; empty if the cause is none of those below."""
    chain = list(causes(error))
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    statuses = [getattr(getattr(each, "response", None), "status_code", None) for each in chain]
    status = next((status for status in statuses if isinstance(status, int)), 0)
    codes = {each.errno for each in chain if isinstance(each, OSError)}
    if "OfflineModeIsEnabled" in kinds:
        return f"unset HF_HUB_OFFLINE, or {without_network}"
    if any("CERTIFICATE_VERIFY_FAILED" in str(each) for each in chain):
        return "set SSL_CERT_FILE to a file with your company's certificates"
    if codes & {*_NO_ROOM}:
        return "free disk space, or set HF_HOME to a folder with more"
    if codes & {*_NO_ACCESS}:
        return "set HF_HOME to a folder in which you may write, or correct the permissions"
    if status in (401, 403, 404) or kinds & {"RepositoryNotFoundError", "LocalTokenNotFoundError"}:
        return f"check the name, and set HF_TOKEN for {access}, or run hf auth login"
    if status == 429 or status >= 500:
        return "try again later"
    if kinds & _NETWORK:
        return f"check the network and HTTPS_PROXY, or {without_network}"
    return ""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it, the first cause last; also what `raise … from None` hides, as `datasets` has it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
