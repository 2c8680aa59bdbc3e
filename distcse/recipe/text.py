"""Sections of the unlabeled text: `corpus`, `candidates` of its queries, and `pairs` of a mutual distillation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distcse.recipe.encoders import Role
from distcse.recipe.names import HubDataSetName, absolute_folder, absolute_paths
from distcse.recipe.section import Name, Section, Weight


class TextSection(Section):
    """Files or a data set of texts."""

    path: str | list[str] | None = None
    """File or files with a sentence per line or row ([formats](../how-to/corpus.md)). `package:NAME/FILE` is in an installed
    package."""
    dataset: HubDataSetName | None = None
    """Hugging Face data set: a local folder, or else a name on the hub."""
    dataset_config: str | None = None
    """Configuration of `dataset`, if it has several."""
    split: str = "train"
    """Split of `dataset`."""
    streaming: bool = False
    """Download only the first `limit` rows of `dataset`."""
    column: str = "text"
    """Column, or key of JSON objects, of the sentence."""
    title_column: str | None = None
    """Column, or key, of a title that is put before the text, as in BEIR."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """First sentences to use; null uses all."""

    @property
    def unread_keys(self) -> Mapping[str, str]:
        return {} if self.dataset is not None else dict.fromkeys(("dataset_config", "split"), "dataset is null")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.path is not None and self.dataset is not None:
            raise ValueError("gives path and dataset, but a corpus has one source; keep one, and set the other to null")
        if self.streaming and (self.dataset is None or self.limit is None):
            raise ValueError("streaming fetches the first rows of a data set; write dataset: NAME and limit: N")
        return self

    def with_absolute_paths(self) -> Self:
        """Return a copy with paths resolved against the current directory."""
        return self.model_copy(update={"path": absolute_paths(self.path), "dataset": absolute_folder(self.dataset)})


class SourceSection(TextSection):
    """One source of a corpus, whose rows have one role."""

    role: Role = "text"
    """`query`, `document`, or `text` for neither. Encoders read each role with [its prompt](#student)."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often an epoch uses each row; 0.5 draws another half of the rows every epoch. Not read with `objective.candidates`."""


class CorpusSection(TextSection):
    """The unlabeled text: `path` or `dataset`, or `sources` with roles."""

    sources: list[SourceSection] = Field(default_factory=list)
    """Files or data sets with a role each, such as [queries and documents](../how-to/search.md), in place of `path`."""
    deduplicate: Literal["exact", "none"] = "none"
    """`exact` drops repeated sentences of a role (`limit` counts them). Teachers embed them once either way."""
    exclude_evaluation: bool = False
    """Drop sentences of `evaluation.data` and the dev set, ignoring case, punctuation and spacing."""

    @property
    def all_sources(self) -> list[SourceSection]:
        """The sources in the order of their rows; `path` or `dataset` is one of role `text`."""
        if self.sources or (self.path is None and self.dataset is None):
            return self.sources
        return [SourceSection(**{name: getattr(self, name) for name in TextSection.model_fields})]

    @property
    def limit_of_all(self) -> int | None:
        """Most rows that the corpus has; None if a source has no limit."""
        limits = [source.limit for source in self.all_sources]
        return sum(limit for limit in limits if limit is not None) if limits and None not in limits else None

    def limits(self, rows: int) -> dict[str, int]:
        """Return the keys of the limits of a part of the text with about this many rows, and their values."""
        if not self.sources:
            return {"limit": min(self.limit or rows, rows)}
        share = -(-rows // len(self.sources))
        return {
            f"sources.{number}.limit": min(source.limit or share, share) for number, source in enumerate(self.sources)
        }

    @model_validator(mode="after")
    def _sources_stand_alone(self) -> Self:
        if given := [
            name for name in ("path", "dataset", "limit", "title_column") if self.sources and getattr(self, name)
        ]:
            raise ValueError(f"gives sources and {given[0]}; write {given[0]} in a source, and set it to null here")
        roles = {source.role for source in self.sources}
        if "query" in roles and "document" not in roles:
            raise ValueError(
                "has queries, and no source has role: document for them to find; add one, or write role: text"
            )
        return self

    def with_absolute_paths(self) -> Self:
        sources = [source.with_absolute_paths() for source in self.sources]
        return super().with_absolute_paths().model_copy(update={"sources": sources})


class CandidatesSection(Section):
    """For each query of the corpus its nearest documents by the teachers together or by BM25, and some at random."""

    per_query: Annotated[int, Field(ge=2, le=1024)] = 32
    """Documents that are found for each query."""
    by: Literal["teachers", "bm25", "both"] = "teachers"
    """Search by cosines of the teachers' tables, by shared words (BM25), or half each; scores are always the teachers'. If too
    few documents share a word with a query, random ones replace them, with `both` the teachers'."""
    random: Annotated[int, Field(ge=0)] = 4
    """Of them, documents drawn at random, the same for every seed."""
    per_step: Annotated[int, Field(ge=2)] = 7
    """Candidates of a query per step, drawn in every epoch. The `training.batch_size` rows of a batch are queries with these.
    """

    exact_up_to: Annotated[int, Field(ge=0)] = 1_000_000
    """Documents up to which tables are searched exactly, on GPUs where there are any. Among more (n), each query is compared
    with those in 32 of 4·√n lists, on CPUs (faiss)."""

    @model_validator(mode="after")
    def _has_enough(self) -> Self:
        if self.random >= self.per_query:
            raise ValueError(
                f"random is {self.random} of {self.per_query} per query, so none is near; write a smaller random"
            )
        if self.per_step > self.per_query:
            raise ValueError(f"per_step is {self.per_step}, but a query has {self.per_query}; write a smaller per_step")
        return self

    def searches_lists(self, documents: float) -> bool:
        """Whether the teachers' tables of this many documents are searched in lists."""
        return self.by != "bm25" and documents > self.exact_up_to

    @property
    def rows_per_query(self) -> int:
        """Rows of a batch that belong to one query: itself, and its candidates."""
        return 1 + self.per_step


class BandSection(Section):
    """Band of neighbors whose cosine lies in [low, high)."""

    low: Annotated[float, Field(ge=-1, le=1)]
    """Lowest cosine of the band."""
    high: Annotated[float, Field(ge=-1, le=2)]
    """Upper bound of the cosine, exclusive."""
    share: Weight = 1.0
    """Share of the mined pairs, relative to the other shares."""

    @model_validator(mode="after")
    def _is_a_band(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; no pair lies between them")
        return self


class MiningSection(Section):
    """Pairs mined from raw text, without any test set."""

    corpus: CorpusSection
    """Unlabeled text to mine."""
    pairs: Annotated[int, Field(ge=2)] = 10_000
    """Number of pairs to mine."""
    num_neighbors: Annotated[int, Field(ge=1)] = 20
    """Nearest neighbors per sentence, by the first group's start and by BM25."""
    bands: list[BandSection] = Field(
        default_factory=lambda: [
            BandSection(low=0.9, high=2.0),
            BandSection(low=0.7, high=0.9),
            BandSection(low=0.5, high=0.7),
        ]
    )
    """Cosine bands that neighbors are drawn from."""
    bm25_share: Weight = 1.0
    """Share of pairs found by BM25, similar in words."""
    random_share: Weight = 1.0
    """Share of pairs drawn at random."""

    @model_validator(mode="after")
    def _takes_something(self) -> Self:
        if not (sum(band.share for band in self.bands) + self.bm25_share + self.random_share):
            raise ValueError("all shares are 0; give a band, bm25_share or random_share one above 0")
        return self


class PairsSection(Section):
    """The unlabeled sentence pairs: exactly one of `path`, `task` and `mine`."""

    path: str | list[str] | None = None
    """File or files with two columns of sentences: .tsv, .csv, .jsonl (each also .gz) or .parquet."""
    columns: Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: ["sentence1", "sentence2"]
    )
    """Names of the two columns."""
    task: Name | None = None
    """Task whose pairs are used, test pairs included (transductive): all files of `pairs/TASK`, or else `sts/TASK`, in
    `evaluation.data`."""
    mine: MiningSection | None = None
    """Mine pairs from raw text."""
    limit: Annotated[int, Field(ge=2)] | None = None
    """Number of distinct pairs, drawn by the seed; null uses all."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("path", "task", "mine") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"gives {' and '.join(given) or 'no source'}; pairs have one: path, task or mine")
        return self
