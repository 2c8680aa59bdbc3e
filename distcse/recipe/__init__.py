"""The recipe: every knob of a run in one typed, validated document. Nothing else in distcse parses configuration."""

from distcse.recipe.encoders import (
    EncoderSection,
    EndpointSection,
    Pooling,
    Projection,
    StudentSection,
    TeacherSection,
    TeachersSection,
    TrainedSection,
)
from distcse.recipe.loading import load_recipe, packaged_recipes, read_recipe, read_sweep, recipe_yaml, with_values
from distcse.recipe.mutual import (
    BiSection,
    CrossSection,
    GroupSection,
    MiningSection,
    MutualRecipe,
    MutualSection,
    PairsSection,
)
from distcse.recipe.objective import (
    ConsistencySection,
    DetectionSection,
    InfoNCESection,
    ObjectiveSection,
    RankRegressionSection,
    RankSection,
)
from distcse.recipe.schema import CorpusSection, EvaluationSection, Recipe, StorageSection
from distcse.recipe.sweep import KnobSection, ScheduleSection, SearchSection, Sweep, WinnerSection
from distcse.recipe.training import LoopSection, TrainingSection

__all__ = [
    "BiSection",
    "ConsistencySection",
    "CorpusSection",
    "CrossSection",
    "DetectionSection",
    "EncoderSection",
    "EndpointSection",
    "EvaluationSection",
    "GroupSection",
    "InfoNCESection",
    "KnobSection",
    "LoopSection",
    "MiningSection",
    "MutualRecipe",
    "MutualSection",
    "ObjectiveSection",
    "PairsSection",
    "Pooling",
    "Projection",
    "RankRegressionSection",
    "RankSection",
    "Recipe",
    "ScheduleSection",
    "SearchSection",
    "StorageSection",
    "StudentSection",
    "Sweep",
    "TeacherSection",
    "TeachersSection",
    "TrainedSection",
    "TrainingSection",
    "WinnerSection",
    "load_recipe",
    "packaged_recipes",
    "read_recipe",
    "read_sweep",
    "recipe_yaml",
    "with_values",
]
