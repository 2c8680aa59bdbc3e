"""The section `evaluation`: dev scores, the final evaluation, and ranks at inference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from distcse.recipe.names import is_path
from distcse.recipe.section import Gpus, Precision, Section

Measure = Literal["sts", "transfer", "pairs", "ranking", "geometry", "retrieval", "agreement"]


_DEV_SCORES = ("auto", "stsb", "sickr", "stsb_sickr", "agreement", "none")


class AsyncEvalSection(Section):
    """Resources of the process that computes dev scores during training, on one of the nodes that may train."""

    cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs of the process."""
    gpus: Gpus | None = None
    """GPUs of the process, or a fraction of one; null assigns a quarter of one, where the nodes have GPUs."""


class RankInferenceSection(Section):
    """Ranks at inference: λ · ρ + (1 - λ) · cosine (RankEncoder Eq. 7)."""

    weight: Annotated[float, Field(ge=0, le=1)] = 0.1
    """λ, from 0 (cosine only) to 1 (ranks only)."""
    num_references: Annotated[int, Field(ge=2)] = 100_000
    """Corpus sentences that are ranked: the same as those of a rank-space teacher, and all of a smaller corpus."""
    normalize: bool = True
    """Rank the references by cosine; false ranks them by inner product, as the public code does at inference."""
    rank_method: Literal["sort", "histogram"] = "sort"
    """How references are ranked, as for teachers: `sort` is exact, `histogram` faster with tens of thousands on CPUs."""


class EvaluationSection(Section):
    """Evaluation during training and at its end."""

    data: str | None = None
    """Folder of labelled sets: `sts/stsb/dev.tsv.gz`, `sts/sts12/test.tsv.gz` and so on."""
    dev: str = "auto"
    """Score that selects the best checkpoint: `stsb` (Spearman correlation on STS-B dev), `sickr` (on SICK-R trial),
    `stsb_sickr` (the mean of both), `agreement` with the teachers on held-out rows, [a path of
    yours](../how-to/evaluate.md#the-dev-set), or `none`, which takes the last checkpoint. `auto` is `stsb` where `data` is
    set, else `agreement` where there are teachers, else `none`."""
    dev_is_test: bool = False
    """Allow a test set as the dev set. Checkpoints are then selected on it, so its scores are no measurement."""
    num_heldout: Annotated[int, Field(ge=0)] = 512
    """Rows of the corpus that are excluded from training, as are those with the same text; `agreement` is computed on them.
    This default, or a packaged recipe's, is lowered to a tenth of a smaller corpus. A value of yours is kept."""
    eval_steps: Annotated[int, Field(ge=1)] = 125
    """Steps between two dev scores. Each dev score also writes a checkpoint."""
    async_eval: AsyncEvalSection | None = None
    """Compute dev scores in a separate process while the workers continue; `{}` uses one CPU. A score arrives at most one
    checkpoint later, so early stopping stops one checkpoint later. null computes them in the workers, as trials of a sweep
    do."""
    precision: Precision = "auto"
    """Precision of dev scores and of the final evaluation. `auto` is bf16 where the evaluating devices have fast bf16 units,
    else fp32; the report names it."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many dev scores without a new best; null disables early stopping."""
    final_suites: list[Measure] | Literal["with_transfer"] | None = None
    """Suites for the final evaluation of the initial model, the student and the teachers. null runs `sts`, `ranking`,
    `geometry` and `retrieval` where `data` is set, else `agreement`. `with_transfer` adds `transfer` where `data` is set,
    which takes minutes per model ([how many](../how-to/evaluate.md#in-a-training-run))."""
    rank_inference: RankInferenceSection | None = None
    """Also measure the student with ranks at inference, on the suites of pairs, and store it with its references as `ranker`
    in the run's folder; `{}` has RankEncoder's settings. null does not."""

    @field_validator("dev")
    @classmethod
    def _is_a_score_or_a_path(cls, name: str) -> str:
        if name not in _DEV_SCORES and not is_path(name):
            raise ValueError(
                f"{name!r} is no dev score; allowed: {', '.join(_DEV_SCORES)}, or the path of a set of yours: "
                f"./{name or 'dev'}.tsv, or the folder ./{name or 'dev'}"
            )
        return name
