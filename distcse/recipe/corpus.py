"""The section `corpus`: the sentences to train on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from distcse.recipe.hub_names import HubDataSetName
from distcse.recipe.paths import absolute_folder, absolute_paths
from distcse.recipe.section import Section


class CorpusSection(Section):
    """The unlabelled sentences: exactly one of `path` and `dataset`."""

    path: str | list[str] | None = None
    """File or list of files: .txt, .jsonl, .ndjson, .json (a list of objects), .csv or .tsv, each also compressed (.gz, .bz2,
    .xz, .zst), or .parquet, with one sentence per line or row. `package:NAME/FILE` is a file inside an installed package."""
    dataset: HubDataSetName | None = None
    """Name of a Hugging Face data set, or a local folder. Only a name that is not a folder is looked up on the hub."""
    dataset_config: str | None = None
    """Configuration of `dataset`, for data sets that have several."""
    split: str = "train"
    """Split of `dataset`."""
    streaming: bool = False
    """Download only the first `limit` rows of `dataset` instead of all its files. They are cached like any corpus."""
    column: str = "text"
    """Column (.csv, .parquet, data set) or key (.jsonl) of the sentence."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first N sentences; null uses all."""
    deduplicate: Literal["exact", "none"] = "none"
    """`exact` leaves out sentences that equal an earlier one; `limit` counts them. `none` trains on
    them as often as they occur. Teachers embed them once either way."""
    exclude_evaluation: bool = False
    """Drop sentences that occur in a labelled set of `evaluation.data` or in the dev set, ignoring case, punctuation and
    spacing."""

    @property
    def unread_keys(self) -> Mapping[str, str]:
        return {} if self.dataset is not None else dict.fromkeys(("dataset_config", "split"), "dataset is null")

    @model_validator(mode="after")
    def _one_source(self) -> CorpusSection:
        if self.path is not None and self.dataset is not None:
            raise ValueError("gives path and dataset, but a corpus has one source; keep one, and set the other to null")
        if self.streaming and (self.dataset is None or self.limit is None):
            raise ValueError("streaming fetches the first rows of a data set; write dataset: NAME and limit: N")
        return self

    def with_absolute_paths(self) -> CorpusSection:
        """Return a copy with paths resolved against the current directory."""
        return self.model_copy(update={"path": absolute_paths(self.path), "dataset": absolute_folder(self.dataset)})
