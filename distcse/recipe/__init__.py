"""The recipe: every knob of a run in one typed, validated document. Nothing else in distcse parses configuration."""

from distcse.recipe.loading import load_recipe, packaged_recipes, recipe_yaml
from distcse.recipe.schema import (
    ConsistencySection,
    CorpusSection,
    EncoderSection,
    EvaluationSection,
    InfoNCESection,
    ObjectiveSection,
    Pooling,
    Projection,
    RankSection,
    Recipe,
    StorageSection,
    StudentSection,
    TeacherSection,
    TeachersSection,
    TrainingSection,
)

__all__ = [
    "ConsistencySection",
    "CorpusSection",
    "EncoderSection",
    "EvaluationSection",
    "InfoNCESection",
    "ObjectiveSection",
    "Pooling",
    "Projection",
    "RankSection",
    "Recipe",
    "StorageSection",
    "StudentSection",
    "TeacherSection",
    "TeachersSection",
    "TrainingSection",
    "load_recipe",
    "packaged_recipes",
    "recipe_yaml",
]
