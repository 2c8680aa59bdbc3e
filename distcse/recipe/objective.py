"""Recipe sections of the objective: terms and weights. The defaults are RankCSE's common setting (paper, Table 9)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from distcse.recipe.custom import ClassPath, CustomKwarg
from distcse.recipe.section import Name, Section, Weight

Temperature = Annotated[float, Field(ge=1e-4, le=10)]
"""At least 1e-4: below it, the rounding of a float32 cosine changes a logit by a factor of e."""


class FalseNegativesSection(Section):
    """Treatment of in-batch negatives that the teachers rate as near-identical."""

    threshold: Annotated[float, Field(gt=-1, lt=1)] = 0.9
    """Similarity (the teachers' weighted mean) from which a pair counts as a false negative."""
    form: Literal["mask", "soften"] = "mask"
    """`mask` excludes false negatives; `soften` decreases their weight from 1 at `threshold` to 0 at similarity 1."""


class InfoNCESection(Section):
    """InfoNCE over the global batch, one direction (SimCSE Eq. 1; RankCSE §4.2, Eq. 1)."""

    weight: Weight = 1.0
    """Weight of the term in the sum."""

    false_negatives: FalseNegativesSection | None = None
    """Treatment of false negatives, which needs teachers; null keeps all negatives."""


class ConsistencySection(Section):
    """Consistency between the two views' lists (RankCSE Eq. 2)."""

    beta: Weight = 1.0
    """Weight β of the term in the sum."""
    form: Literal["js", "neg_entropy"] = "js"
    """`js` is the paper's Jensen–Shannon divergence; `neg_entropy` is what the public code computes."""


class QueueSection(Section):
    """Sentences outside the batch that extend every list. Gradients flow through the batch's vectors only."""

    num_batches: Annotated[int, Field(ge=0)] = 8
    """Recent batches whose student vectors are kept in a queue, as computed then."""
    num_anchors: Annotated[int, Field(ge=0)] = 0
    """Corpus rows in every list, drawn by the seed and excluded from training."""
    refresh_steps: Annotated[int, Field(ge=1)] = 16
    """Steps between two encodings of the anchors by the student."""

    @model_validator(mode="after")
    def _holds_something(self) -> QueueSection:
        if not self.num_batches and not self.num_anchors:
            raise ValueError("holds nothing; write num_batches or num_anchors above 0, or queue: null")
        return self


class RankSection(Section):
    """Ranking distillation from the teachers' lists (RankCSE Eq. 4 and 5)."""

    form: Literal["list_net", "list_mle"] = "list_net"
    """`list_net` (ListNet) matches the top-one distribution; `list_mle` (ListMLE) maximises the likelihood of the teachers'
    order."""
    gamma: Weight = 1.0
    """Weight γ of the term in the sum."""
    tau2: Temperature = 0.05
    """Temperature of the student's list."""
    tau3: Temperature = 0.025
    """Temperature of the teachers' list (ListNet only)."""
    exclude_positive: bool | None = None
    """Exclude the sentence itself from its list; null is the paper's choice: true for ListNet, false for ListMLE."""
    list_reduction: Literal["sum", "mean"] = "sum"
    """ListMLE's reduction over a list; `mean` divides by the list's length."""
    eps: Annotated[float, Field(gt=0, le=1e-3)] | None = None
    """ListMLE only: constant added inside the logarithm, 1e-10 or 1e-7 in the public codes; null adds none."""
    queue: QueueSection | None = None
    """Sentences that extend the lists beyond the batch; null uses the batch alone."""


class RankRegressionSection(Section):
    """Regression of the student's cosines on the teachers' rank-space similarities (RankEncoder Eq. 6)."""

    weight: Weight = 0.05
    """Weight λ of the term in the sum."""
    lower: Annotated[float, Field(ge=-2, le=2)] = 0.5
    """τl: exclude pairs below this similarity."""
    upper: Annotated[float, Field(ge=-2, le=2)] = 0.8
    """τu: exclude pairs above this similarity; 0.9999 excludes only the sentence itself."""
    student_similarity: Literal["cross_view", "same_view"] = "cross_view"
    """Cosine between a pair's different views, as in the public code, or between its first views."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RankRegressionSection:
        if self.lower >= self.upper:
            raise ValueError(f"lower is {self.lower} and upper {self.upper}; no pair lies between them")
        return self


class RegressionSection(Section):
    """Regression of the student's vectors on the teachers' vectors (Stella and Jasper; LEAF)."""

    weight: Weight = 1.0
    """Weight of the term in the sum."""
    form: Literal["cosine", "mse"] = "cosine"
    """`cosine` is 1 - cos; `mse` is the squared distance, which also fits the norm."""
    teachers: list[Annotated[int, Field(ge=0)]] | None = None
    """Indices of the teachers whose vectors, weighted by alpha, are concatenated into the target; null takes all. A single
    teacher of the student's width is used unchanged; any other target is projected to the student's width."""


class DetectionSection(Section):
    """Replaced token detection, conditioned on the sentence's vector (DiffCSE §3)."""

    weight: Weight = 0.005
    """Weight λ of the term in the sum."""
    generator: str | None = None
    """Folder or hub id of a masked language model with the student's vocabulary; not needed for `deletion`."""
    operation: Literal["replacement", "insertion", "deletion"] = "replacement"
    """Edit applied to the sentence (DiffCSE Table 4)."""
    masking_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of tokens that are masked, inserted or deleted, drawn separately for each view."""
    replace: Literal["all_positions", "masked_only"] = "all_positions"
    """Where the generator's tokens replace the sentence's: at all positions, as in the public code, or only at masked ones."""
    sampling: Literal["argmax", "sample"] = "argmax"
    """How the generator's token is chosen: the most likely one, as in the public code, or sampled, as in the paper."""
    reduction: Literal["all", "nonpad"] = "all"
    """`all` averages over all positions including padding, as in the public code, for which λ is tuned; `nonpad` averages
    over tokens. Padding is that of the global batch's edited sentences, for any number of workers, dropout streams and
    chunks."""
    condition: Literal["projected", "pooled"] = "projected"
    """Sentence vector that conditions the discriminator: after the projection, or before it."""
    generator_dropout: bool = True
    """Apply dropout in the frozen generator, as the public code does."""

    @model_validator(mode="after")
    def _has_a_generator(self) -> DetectionSection:
        if self.generator is None and self.operation != "deletion":
            raise ValueError(f"operation {self.operation} needs a generator; write generator: FOLDER or a hub id")
        return self


class CustomLossSection(Section):
    """A custom loss term ([how to write one](../how-to/extend.md))."""

    class_path: ClassPath
    """`module:Class`, importable on every worker of the run."""
    weight: Weight = 1.0
    """Weight of the term in the sum."""
    kwargs: dict[str, CustomKwarg] = Field(default_factory=dict)
    """Keyword arguments of the class's constructor."""


class ObjectiveSection(Section):
    """The weighted sum of loss terms; null disables a term."""

    tau1: Temperature = 0.05
    """Temperature of InfoNCE and of the consistency term."""
    info_nce: InfoNCESection | None = InfoNCESection()
    """Contrastive term."""
    consistency: ConsistencySection | None = ConsistencySection()
    """Consistency term."""
    rank: RankSection | None = RankSection()
    """Ranking distillation term; needs teachers."""
    rank_regression: RankRegressionSection | None = None
    """RankEncoder's term; needs teachers, which the paper has in rank space."""
    regression: RegressionSection | None = None
    """Vector regression term, in addition to list terms or instead of them; needs teachers with tables."""
    detection: DetectionSection | None = None
    """DiffCSE's term."""
    custom: dict[Name, CustomLossSection] = Field(default_factory=dict)
    """Custom terms, by the name that reports use."""
    combine: Literal["sum", "hinge"] = "sum"
    """`sum` of all terms; `hinge` is max(InfoNCE, λ · rank regression) of the batch (RankEncoder Eq. 5), plus the other
    terms."""

    @model_validator(mode="after")
    def _own_names_are_new(self) -> ObjectiveSection:
        taken = [*type(self).model_fields, "loss", "pos_cos", "neg_cos", "edited_found", "kept_found"]
        if named := next((name for name in self.custom if name in taken), None):
            raise ValueError(f"custom has a term called {named!r}, a name that is taken; give it another")
        return self

    @property
    def memory(self) -> QueueSection | None:
        """The queue that extends the lists; None without one, or where the rank term has no weight."""
        return self.rank.queue if self.rank is not None and self.rank.gamma else None
