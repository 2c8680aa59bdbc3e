"""The section `objective`: settings of the losses, a class a loss, and how they are summed.

distcse/losses/KEY.py has the mathematics of a key. Recipes are read without PyTorch, so a section names its term as text. To add
a loss, see CONTRIBUTING.md. The defaults are RankCSE's common setting (paper, Table 9).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from distcse.errors import ArgumentError
from distcse.recipe.names import ClassPath, CustomKwarg, HubName, absolute_folder, absolute_location
from distcse.recipe.section import Name, Section, Weight

HINGE_TERMS = ("info_nce", "rank_regression")
"""The terms of which `combine: hinge` takes the larger one."""
_METRICS = ("loss", "pos_cos", "neg_cos", "edited_accuracy", "kept_accuracy")
"""Values that an objective reports besides its terms."""

Temperature = Annotated[float, Field(ge=1e-4, le=10)]
"""At least 1e-4: below it, the rounding of a float32 cosine changes a logit by a factor of e."""

Need = Literal["lists", "vectors", "candidates", "detector"]
"""What a term needs apart from the two views of the batch:

- `lists`: the teachers' similarity lists;
- `vectors`: the teachers' vectors of the batch's rows;
- `candidates`: rows that are queries with candidates, and the teachers' scores of these;
- `detector`: the discriminator of edited tokens.
"""
ClassAndArguments = tuple[str, Mapping[str, Any]]
"""A class as `module:Class`, and keyword arguments of its constructor."""


class LossSection(Section):
    """Settings of a loss term. A subclass also answers what the rest of distcse asks about the term."""

    weight_key: ClassVar[str] = "weight"
    """Key of the term's weight in the sum."""
    contrasts_views: ClassVar[bool] = False
    """Whether the term compares a sentence's two views, and needs dropout to tell them apart."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """What the term needs besides the two views."""

    @property
    def weight_in_sum(self) -> float:
        """Weight of the term in the sum, whatever its key."""
        weight: float = getattr(self, self.weight_key)
        return weight

    def term(self, tau1: float) -> ClassAndArguments:
        """Return the term's class, imported when an objective is built, and its arguments; `tau1` is the objective's."""
        raise NotImplementedError


class InfoNCESection(LossSection):
    """InfoNCE over the global batch, one direction (SimCSE Eq. 1; RankCSE §4.2, Eq. 1)."""

    contrasts_views = True

    weight: Weight = 1.0
    """Weight of the term in the sum."""

    def term(self, tau1: float) -> ClassAndArguments:
        return "distcse.losses.info_nce:InfoNCE", {"tau1": tau1}


class ConsistencySection(LossSection):
    """Consistency between the two views' lists (RankCSE Eq. 2)."""

    contrasts_views = True
    weight_key = "beta"

    beta: Weight = 1.0
    """Weight β of the term in the sum."""
    form: Literal["js", "neg_entropy"] = "js"
    """`js`: the paper's Jensen–Shannon divergence; `neg_entropy`: the public code's term."""

    def term(self, tau1: float) -> ClassAndArguments:
        return "distcse.losses.consistency:Consistency", {"tau1": tau1, "form": self.form}


class RankSection(LossSection):
    """Ranking distillation from the teachers' lists (RankCSE Eq. 4 and 5)."""

    needs = ("lists",)
    weight_key = "gamma"

    form: Literal["list_net", "list_mle"] = "list_net"
    """`list_net` matches top-one distributions; `list_mle` maximizes the likelihood of the teachers' order."""
    gamma: Weight = 1.0
    """Weight γ of the term in the sum."""
    tau2: Temperature = 0.05
    """Temperature of the student's list."""
    tau3: Temperature = 0.025
    """Temperature of the teachers' list (ListNet only)."""
    exclude_positive: bool | None = None
    """Exclude the sentence itself from its list; null is true for ListNet, false for ListMLE, as in the paper."""
    list_reduction: Literal["sum", "mean"] = "sum"
    """ListMLE's reduction over a list."""
    eps: Annotated[float, Field(gt=0, le=1e-3)] | None = None
    """Constant inside ListMLE's logarithm, 1e-10 or 1e-7 in public codes; null adds none."""

    def term(self, tau1: float) -> ClassAndArguments:
        is_list_net = self.form == "list_net"
        excludes = is_list_net if self.exclude_positive is None else self.exclude_positive
        arguments = {"tau2": self.tau2, "exclude_positive": excludes}
        if is_list_net:
            return "distcse.losses.rank:ListNet", {**arguments, "tau3": self.tau3}
        return "distcse.losses.rank:ListMLE", {**arguments, "list_reduction": self.list_reduction, "eps": self.eps}

    @property
    def unread_keys(self) -> Mapping[str, str]:
        unread = ("tau3",) if self.form == "list_mle" else ("list_reduction", "eps")
        return dict.fromkeys(unread, f"form is {self.form}")


class RankRegressionSection(LossSection):
    """Regression of the student's cosines on the teachers' rank-space similarities (RankEncoder Eq. 6)."""

    needs = ("lists",)

    weight: Weight = 0.05
    """Weight λ of the term in the sum."""
    lower: Annotated[float, Field(ge=-2, le=2)] = 0.5
    """τl: exclude pairs below this similarity."""
    upper: Annotated[float, Field(ge=-2, le=2)] = 0.8
    """τu: exclude pairs above this similarity; 0.9999 excludes only the sentence itself."""
    student_similarity: Literal["cross_view", "same_view"] = "cross_view"
    """Cosine between a pair's different views, as in the public code, or its first views."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RankRegressionSection:
        if self.lower >= self.upper:
            raise ValueError(f"lower is {self.lower} and upper {self.upper}; no pair lies between them")
        return self

    def term(self, tau1: float) -> ClassAndArguments:
        same_view = self.student_similarity == "same_view"
        arguments = {"lower": self.lower, "upper": self.upper, "same_view": same_view}
        return "distcse.losses.rank_regression:RankRegression", arguments


class RegressionSection(LossSection):
    """Regression of the student's vectors on the teachers' vectors (Stella and Jasper; LEAF)."""

    needs = ("vectors",)

    weight: Weight = 1.0
    """Weight of the term in the sum."""
    form: Literal["cosine", "mse"] = "cosine"
    """`cosine` is 1 - cos; `mse`, the squared distance, also fits the norm."""
    teachers: list[Annotated[int, Field(ge=0)]] | None = None
    """Indices of teachers whose vectors, weighted by `alpha`, are joined into the target; null takes all. The target is
    projected to the student's width, unless it is one teacher of that width."""

    projection: str | None = None
    """Folder or address of a run whose projection is used, so that this student searches that student's index; text, teachers,
    weights and width must be equal. null fits one, rotated toward the student's initial vectors."""

    def term(self, tau1: float) -> ClassAndArguments:
        return "distcse.losses.regression:Regression", {"form": self.form}


class CandidateRankSection(LossSection):
    """Ranking of each query's `candidates` by the teachers' scores."""

    needs = ("candidates",)

    weight: Weight = 1.0
    """Weight of the term in the sum."""
    form: Literal["list_net", "list_mle", "margin_mse"] = "list_net"
    """`list_net` matches distributions (Kullback-Leibler divergence); `list_mle` maximizes the likelihood of the teachers'
    order; `margin_mse` fits differences of two scores."""
    tau2: Temperature = 0.05
    """Temperature of the student's list."""
    tau3: Temperature = 0.05
    """Temperature of the teachers' list (ListNet only)."""

    def term(self, tau1: float) -> ClassAndArguments:
        return "distcse.losses.candidates:CandidateRank", {"form": self.form, "tau2": self.tau2, "tau3": self.tau3}

    @property
    def unread_keys(self) -> Mapping[str, str]:
        unread = {"list_net": (), "list_mle": ("tau3",), "margin_mse": ("tau2", "tau3")}[self.form]
        return dict.fromkeys(unread, f"form is {self.form}")


class DetectionSection(LossSection):
    """Replaced token detection, given the sentence's vector (DiffCSE §3)."""

    needs = ("detector",)

    weight: Weight = 0.005
    """Weight λ of the term in the sum."""
    generator: HubName
    """Masked language model with the student's vocabulary: folder or hub id."""
    masking_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of tokens that are masked, drawn per view."""
    replace: Literal["all_positions", "masked_only"] = "all_positions"
    """Where the generator's tokens replace the sentence's; `all_positions` as in the public code."""
    sampling: Literal["argmax", "sample"] = "argmax"
    """The generator's token: `argmax` as in the public code, `sample` as in the paper."""
    reduction: Literal["all", "nonpad"] = "all"
    """`all` averages over all positions of the padded global batch, as in the public code (λ is tuned for it); `nonpad` over
    tokens."""
    condition: Literal["projected", "pooled"] = "projected"
    """Vector that conditions the discriminator: after or before the projection."""
    generator_dropout: bool = True
    """Dropout in the frozen generator, as in the public code."""

    def term(self, tau1: float) -> ClassAndArguments:
        return "distcse.losses.detection:ReplacedTokenDetection", {}


class CustomLossSection(LossSection):
    """A custom loss term ([how to write one](../how-to/extend.md#add-a-loss))."""

    class_path: ClassPath
    """`module:Class`, importable on every worker of the run."""
    weight: Weight = 1.0
    """Weight of the term in the sum."""
    kwargs: dict[str, CustomKwarg] = Field(default_factory=dict)
    """Arguments of its constructor."""

    @classmethod
    def of(cls, name: str, loss: object) -> CustomLossSection:
        """Describe a loss of Python code: a class, or an object with its constructor's arguments as attributes."""
        kind = loss if isinstance(loss, type) else type(loss)
        if "." in kind.__qualname__:
            raise ArgumentError(
                f"losses: {name} is of class {kind.__qualname__}, which workers cannot import; define it at the top of a module"
            )
        arguments = () if isinstance(loss, type) else inspect.signature(kind).parameters
        if unknown := [each for each in arguments if not hasattr(loss, each)]:
            raise ArgumentError(
                f"losses: {name} is a {kind.__name__} without attribute {unknown[0]!r}, so workers cannot build it again; write "
                f"self.{unknown[0]} = {unknown[0]} in its constructor, or pass the class"
            )
        try:
            return cls(
                class_path=f"{kind.__module__}:{kind.__name__}",
                kwargs={each: getattr(loss, each) for each in arguments},
            )
        except ValidationError as invalid:
            (path, *_) = (".".join(map(str, error["loc"][:2])) for error in invalid.errors())
            raise ArgumentError(
                f"losses: {path} of {name} is no number, text or list of these, which a recipe can hold; "
                "pass such a value, and build what follows from it in the constructor"
            ) from None

    def term(self, tau1: float) -> ClassAndArguments:
        return self.class_path, self.kwargs


S = TypeVar("S", bound=LossSection)


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
    """RankEncoder's term; needs teachers, the paper's in rank space."""
    regression: RegressionSection | None = None
    """Vector regression term; needs teachers with tables."""
    candidates: CandidateRankSection | None = None
    """Ranking of each query's candidates; needs teachers."""
    detection: DetectionSection | None = None
    """DiffCSE's term."""
    custom: dict[Name, CustomLossSection] = Field(default_factory=dict)
    """Custom terms, by the name that reports use."""
    combine: Literal["sum", "hinge"] = "sum"
    """`sum` of all terms; `hinge` is max(InfoNCE, λ · rank regression) of the batch (RankEncoder Eq. 5) plus the others."""

    @property
    def unread_keys(self) -> Mapping[str, str]:
        is_read = self.info_nce is not None or self.consistency is not None
        return {} if is_read else {"tau1": "info_nce and consistency are null"}

    @model_validator(mode="after")
    def _custom_names_are_free(self) -> ObjectiveSection:
        taken = [*type(self).model_fields, *_METRICS]
        if named := next((name for name in self.custom if name in taken), None):
            raise ValueError(f"custom has a term called {named!r}, a name that is taken; give it another")
        return self

    @property
    def terms(self) -> dict[str, LossSection]:
        """The terms that are not null, by recipe key relative to `objective`, in the order of the sum."""
        sections = {key: section for key, section in self if isinstance(section, LossSection)}
        return {**sections, **{f"custom.{name}": section for name, section in self.custom.items()}}

    @property
    def active_terms(self) -> dict[str, LossSection]:
        """The terms with a weight above 0, as in `terms`."""
        return {key: section for key, section in self.terms.items() if section.weight_in_sum}

    def active(self, kind: type[S]) -> S | None:
        """Return the settings of the active term of this kind; None if the objective has none."""
        return next((section for section in self.active_terms.values() if isinstance(section, kind)), None)

    def keys_that_need(self, *needs: Need, active: bool = False) -> list[str]:
        """Return the recipe keys that ask for one of these; without custom terms, whose classes are not imported here."""
        terms = self.active_terms if active else self.terms
        return [f"objective.{key}" for key, section in terms.items() if not {*needs}.isdisjoint(section.needs)]

    def vector_teachers(self, count: int) -> list[int]:
        """Return the indices of the teachers whose vectors a term needs, of `count` teachers; empty without such a term."""
        if not any("vectors" in section.needs for section in self.active_terms.values()):
            return []
        regression = self.active(RegressionSection)
        return list(range(count)) if regression is None or regression.teachers is None else regression.teachers

    @property
    def projection_of(self) -> str | None:
        """Folder or address of the run whose projection of the teachers' vectors a term uses; None if one is fitted."""
        regression = self.active(RegressionSection)
        return None if regression is None else regression.projection

    @property
    def models(self) -> list[str]:
        """Folders or hub ids of the frozen models that the terms load."""
        return [] if self.detection is None else [self.detection.generator]

    def with_absolute_paths(self) -> Self:
        """Return a copy with the terms' folders resolved against the current directory."""
        changed: dict[str, LossSection] = {}
        if self.detection is not None:
            generator = absolute_folder(self.detection.generator)
            changed["detection"] = self.detection.model_copy(update={"generator": generator})
        if self.regression is not None and self.regression.projection is not None:
            projection = absolute_location(self.regression.projection)
            changed["regression"] = self.regression.model_copy(update={"projection": projection})
        return self.model_copy(update=changed)
