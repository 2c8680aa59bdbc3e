"""Private names of datasets. Tried with datasets 5.2.0; pyproject.toml allows 4 and later."""

from __future__ import annotations

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
