"""The section `evaluation`: dev scores, the final evaluation, and ranks at inference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from distcse.devices.host import PACKAGE, path_in_package
from distcse.recipe.names import is_path
from distcse.recipe.section import Precision, Section

Measure = Literal["sts", "transfer", "pairs", "ranking", "geometry", "retrieval", "agreement"]


def labelled_folder(data: str | None) -> Path:
    """Return where `evaluation.data`, which must be set, is on this machine. A `LookupError` if its package is not installed."""
    return path_in_package(data) if data is not None and data.startswith(PACKAGE) else Path(str(data))


_DEV_SCORES = ("auto", "stsb", "sickr", "stsb_sickr", "agreement", "none")


class RankInferenceSection(Section):
    """Ranks at inference: λ · ρ + (1 - λ) · cosine (RankEncoder Eq. 7)."""

    weight: Annotated[float, Field(ge=0, le=1)] = 0.1
    """λ, from 0 (cosine only) to 1 (ranks only)."""
    num_references: Annotated[int, Field(ge=2)] = 100_000
    """Corpus sentences that are ranked, those of a rank-space teacher; at most all."""
    normalize: bool = True
    """Rank by cosine; false ranks by inner product, as the public code does."""
    rank_method: Literal["sort", "histogram"] = "sort"
    """As [for teachers](#teachersencoders): `sort` is exact, `histogram` faster on CPUs."""


class EvaluationSection(Section):
    """Evaluation during training and at its end."""

    data: str | None = None
    """Folder of labeled sets ([layout](../how-to/evaluate.md#the-data-folder)); `package:NAME/FOLDER` is inside a package."""
    dev: str = "auto"
    """Score that selects the checkpoint: Spearman's correlation on `stsb` (dev), `sickr` (trial) or `stsb_sickr` (their mean);
    `agreement` with the teachers on held-out rows, of a corpus with queries
    [on the documents that they find](../reference/evaluation.md#agreement-in-a-run);
    [your own set](../how-to/evaluate.md#the-dev-set); or `none`, which takes the last. `auto` is `stsb` with `data`, but not
    of a corpus with queries, else `agreement` with teachers, else `none`."""
    dev_is_test: bool = False
    """Allow a test set as dev set; its scores are then no measurement."""
    num_heldout: Annotated[int, Field(ge=0)] = 512
    """Corpus rows excluded from training, with their duplicates, for `agreement`. For a small corpus, a default or packaged
    value is lowered to a tenth of the rows."""
    eval_steps: Annotated[int, Field(ge=1)] = 125
    """Steps between dev scores; each also writes a checkpoint."""
    precision: Precision = "auto"
    """Precision of dev scores and final evaluation; `auto` is bf16 where all evaluating devices have fast bf16 units, else
    fp32."""
    final_suites: list[Measure] | Literal["with_transfer"] | None = None
    """Suites of the final evaluation of start, student and teachers. null runs `sts`, `ranking`, `geometry` and `retrieval`
    with `data` (of a corpus with queries `retrieval` alone), else `agreement`. `with_transfer` adds `transfer`, which takes
    [minutes per model](../how-to/evaluate.md#in-a-training-run)."""
    rank_inference: RankInferenceSection | None = None
    """Also measure the student with ranks at inference, on the suites of pairs, and store it as `ranker`; `{}` has
    RankEncoder's settings."""

    @field_validator("dev")
    @classmethod
    def _is_a_score_or_a_path(cls, name: str) -> str:
        if name not in _DEV_SCORES and not is_path(name):
            raise ValueError(
                f"{name!r} is no dev score; allowed: {', '.join(_DEV_SCORES)}, or the path of a set of yours: "
                f"./{name or 'dev'}.tsv, or the folder ./{name or 'dev'}"
            )
        return name
