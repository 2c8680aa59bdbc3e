"""The recipe: all settings of a run in one typed, validated document. Nothing else in distcse parses configuration."""

from distcse.recipe.base import FITTED_KEYS, BaseRecipe, RecipeInputs, recipe_classes, register_recipe
from distcse.recipe.encoders import EncoderSection, Pooling, Projection, Role, StudentSection, TrainedSection
from distcse.recipe.evaluation import EvaluationSection, RankInferenceSection, labelled_folder
from distcse.recipe.kinds.distillation import Recipe
from distcse.recipe.kinds.family import FamilyRecipe, MemberSection
from distcse.recipe.kinds.mutual import GroupSection, MutualRecipe, MutualSection
from distcse.recipe.loading import (
    load_recipe,
    packaged_recipes,
    packaged_spaces,
    read_recipe,
    read_sweep,
    recipe_yaml,
    with_values,
)
from distcse.recipe.objective import (
    ConsistencySection,
    CustomLossSection,
    DetectionSection,
    InfoNCESection,
    ObjectiveSection,
    RankRegressionSection,
    RankSection,
    RegressionSection,
)
from distcse.recipe.section import decided
from distcse.recipe.storage import LoggersSection, MLflowSection, StorageSection, WandbSection
from distcse.recipe.sweep import FinalRunsSection, ParameterSection, ScheduleSection, SearchSection, Sweep
from distcse.recipe.teachers import EndpointSection, TeacherSection, TeachersSection
from distcse.recipe.text import (
    CandidatesSection,
    CorpusSection,
    MiningSection,
    PairsSection,
    SourceSection,
    TextSection,
)
from distcse.recipe.training import (
    KINDS,
    BiSection,
    CrossOverrides,
    CrossSection,
    LoopOverrides,
    LoopSection,
    ResourcesSection,
    TrainingSection,
)

__all__ = [
    "FITTED_KEYS",
    "KINDS",
    "BaseRecipe",
    "BiSection",
    "CandidatesSection",
    "ConsistencySection",
    "CorpusSection",
    "CrossOverrides",
    "CrossSection",
    "CustomLossSection",
    "DetectionSection",
    "EncoderSection",
    "EndpointSection",
    "EvaluationSection",
    "FamilyRecipe",
    "FinalRunsSection",
    "GroupSection",
    "InfoNCESection",
    "LoggersSection",
    "LoopOverrides",
    "LoopSection",
    "MLflowSection",
    "MemberSection",
    "MiningSection",
    "MutualRecipe",
    "MutualSection",
    "ObjectiveSection",
    "PairsSection",
    "ParameterSection",
    "Pooling",
    "Projection",
    "RankInferenceSection",
    "RankRegressionSection",
    "RankSection",
    "Recipe",
    "RecipeInputs",
    "RegressionSection",
    "ResourcesSection",
    "Role",
    "ScheduleSection",
    "SearchSection",
    "SourceSection",
    "StorageSection",
    "StudentSection",
    "Sweep",
    "TeacherSection",
    "TeachersSection",
    "TextSection",
    "TrainedSection",
    "TrainingSection",
    "WandbSection",
    "decided",
    "labelled_folder",
    "load_recipe",
    "packaged_recipes",
    "packaged_spaces",
    "read_recipe",
    "read_sweep",
    "recipe_classes",
    "recipe_yaml",
    "register_recipe",
    "with_values",
]
