"""The terms of the objective and their weights. The defaults are those of RankCSE's common setting (paper, Table 9)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from distcse.recipe.own import ClassPath, CustomKwarg
from distcse.recipe.section import Name, Section, Weight

Temperature = Annotated[float, Field(ge=1e-4, le=10)]
"""Below 1e-4 a float32 cosine's own rounding is worth a factor of e: what would be learned is noise."""


class FalseNegativesSection(Section):
    """Pairs of a batch that the teachers call near-identical are no negatives."""

    threshold: Annotated[float, Field(gt=-1, lt=1)] = 0.9
    """Similarity, by the teachers' weighted mean, from which on a pair says the same."""
    form: Literal["mask", "soften"] = "mask"
    """`mask` leaves such negatives out; `soften` lets their weight fall from 1 at `threshold` to 0 at similarity 1."""


class InfoNCESection(Section):
    """InfoNCE over the global batch, one direction (SimCSE Eq. 1; RankCSE §4.2, Eq. 1)."""

    weight: Weight = 1.0
    """Weight of the term in the sum."""

    false_negatives: FalseNegativesSection | None = None
    """What is done about negatives that are none; needs teachers."""


class ConsistencySection(Section):
    """Consistency of the two views' lists (RankCSE Eq. 2)."""

    beta: Weight = 1.0
    """Weight β of the term in the sum."""
    form: Literal["js", "neg_entropy"] = "js"
    """`js` is the paper's Jensen–Shannon divergence; `neg_entropy` is what the public code computes."""


class QueueSection(Section):
    """Sentences beyond the batch that lengthen every list; the gradient goes through the batch's side only."""

    num_batches: Annotated[int, Field(ge=0)] = 8
    """Recent batches whose student vectors, as they were then, are kept in a queue."""
    num_anchors: Annotated[int, Field(ge=0)] = 0
    """Rows of the corpus, drawn by the seed and not trained on, that are in every list."""
    refresh_steps: Annotated[int, Field(ge=1)] = 16
    """Steps after which the anchors are encoded anew by the student."""

    @model_validator(mode="after")
    def _holds_something(self) -> QueueSection:
        if not self.num_batches and not self.num_anchors:
            raise ValueError("holds nothing; write num_batches or num_anchors above 0, or queue: null")
        return self


class RankSection(Section):
    """Ranking distillation from the teachers' lists (RankCSE Eq. 4 and 5)."""

    form: Literal["list_net", "list_mle"] = "list_net"
    """ListNet matches the top-one distribution; ListMLE maximises the likelihood of the teachers' order."""
    gamma: Weight = 1.0
    """Weight γ of the term in the sum."""
    tau2: Temperature = 0.05
    """Temperature of the student's list."""
    tau3: Temperature = 0.025
    """Temperature of the teachers' list (ListNet only)."""
    exclude_positive: bool | None = None
    """Leave the sentence itself out of its list; null is the paper's choice: yes for ListNet, no for ListMLE."""
    list_reduction: Literal["sum", "mean"] = "sum"
    """ListMLE's reduction over a list; `mean` divides by the list's length."""
    eps: Annotated[float, Field(gt=0, le=1e-3)] | None = None
    """ListMLE: null is exact; 1e-10 or 1e-7 adds the public codes' constant inside the logarithm."""
    queue: QueueSection | None = None
    """Longer lists than the batch; null keeps them as long as the batch."""


class RankRegressionSection(Section):
    """The student's cosines shall be the teachers' rank-space similarities (RankEncoder Eq. 6)."""

    weight: Weight = 0.05
    """Weight λ of the term."""
    lower: Annotated[float, Field(ge=-2, le=2)] = 0.5
    """τl: pairs less similar than this are left out."""
    upper: Annotated[float, Field(ge=-2, le=2)] = 0.8
    """τu: pairs more similar than this are left out; 0.9999 drops the sentence itself alone."""
    student_similarity: Literal["cross_view", "same_view"] = "cross_view"
    """Cosine of a pair's different views, as the public code has it, or of its first views."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RankRegressionSection:
        if self.lower >= self.upper:
            raise ValueError(f"lower is {self.lower} and upper {self.upper}; no pair lies between them")
        return self


class RegressionSection(Section):
    """The student's vector shall be that of its teachers (Stella and Jasper; LEAF)."""

    weight: Weight = 1.0
    """Weight of the term in the sum."""
    form: Literal["cosine", "mse"] = "cosine"
    """`cosine` is 1 - cos; `mse` the squared distance, which learns the length too."""
    teachers: list[Annotated[int, Field(ge=0)]] | None = None
    """Numbers of the teachers whose vectors are joined, by their alphas, into the target; null takes all. One teacher of the
    student's own width is the target as it is; anything else is projected onto the student's width."""


class DetectionSection(Section):
    """Replaced token detection, conditioned on the sentence's vector (DiffCSE §3)."""

    weight: Weight = 0.005
    """Weight λ of the term."""
    generator: str | None = None
    """Folder or hub id of a masked language model with the student's vocabulary; `deletion` needs none."""
    operation: Literal["replacement", "insertion", "deletion"] = "replacement"
    """What is done to the sentence (DiffCSE Table 4)."""
    masking_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of tokens that are masked, inserted or deleted; each view has its own."""
    replace: Literal["all_positions", "masked_only"] = "all_positions"
    """The generator's choice counts everywhere, as in the public code, or at masked positions alone."""
    sampling: Literal["argmax", "sample"] = "argmax"
    """The generator's token: its likeliest one, as in the public code, or one drawn with its probability, as in the paper."""
    reduction: Literal["all", "nonpad"] = "all"
    """The mean is over all positions, padding too, as in the public code, to which λ is tuned; or over tokens. Padding is that
    of the global batch's edited sentences, for any number of workers, noise streams and chunks."""
    condition: Literal["projected", "pooled"] = "projected"
    """The vector that the discriminator is told: behind the projection, or before it."""
    generator_dropout: bool = True
    """Dropout in the frozen generator, as the public code has it."""

    @model_validator(mode="after")
    def _has_a_generator(self) -> DetectionSection:
        if self.generator is None and self.operation != "deletion":
            raise ValueError(f"operation {self.operation} needs a generator; write generator: FOLDER or a hub id")
        return self


class CustomLossSection(Section):
    """A custom term ([how to write one](../how-to/extend.md))."""

    class_path: ClassPath
    """`module:Class`, importable wherever the run's workers are."""
    weight: Weight = 1.0
    """Weight of the term in the sum."""
    kwargs: dict[str, CustomKwarg] = Field(default_factory=dict)
    """What the class is made with, by name."""


class ObjectiveSection(Section):
    """The weighted sum of terms; a term set to null is left out."""

    tau1: Temperature = 0.05
    """Temperature of InfoNCE and of the consistency term."""
    info_nce: InfoNCESection | None = InfoNCESection()
    """The contrastive term."""
    consistency: ConsistencySection | None = ConsistencySection()
    """The consistency term."""
    rank: RankSection | None = RankSection()
    """The distillation term; needs teachers."""
    rank_regression: RankRegressionSection | None = None
    """RankEncoder's term; needs teachers, in rank space as the paper has them."""
    regression: RegressionSection | None = None
    """Vector targets beside lists, or instead; needs teachers with tables."""
    detection: DetectionSection | None = None
    """DiffCSE's term."""
    custom: dict[Name, CustomLossSection] = Field(default_factory=dict)
    """Terms of your own, by the name that reports give them."""
    combine: Literal["sum", "hinge"] = "sum"
    """`sum` of all terms; `hinge` is max(InfoNCE, λ · rank regression) of the batch (RankEncoder Eq. 5), others added."""

    @model_validator(mode="after")
    def _own_names_are_new(self) -> ObjectiveSection:
        taken = [*type(self).model_fields, "loss", "pos_cos", "neg_cos", "edited_found", "kept_found"]
        if named := next((name for name in self.custom if name in taken), None):
            raise ValueError(f"custom has a term called {named!r}, a name that is taken; give it another")
        return self

    @property
    def memory(self) -> QueueSection | None:
        """What lengthens the lists; None where nothing does, or no list counts."""
        return self.rank.queue if self.rank is not None and self.rank.gamma else None
