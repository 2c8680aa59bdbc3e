"""Whether the text, the labeled sets and the model folders of a recipe are on this machine: answered without PyTorch."""

from __future__ import annotations

from functools import partial

from distcse.checks import Question, require
from distcse.errors import EvaluationDataError, InvalidValueError
from distcse.model_source import is_hub_id, resolve_model
from distcse.recipe import BaseRecipe, CorpusSection, RecipeInputs, labelled_folder
from distcse.storage import is_uri
from distcse.text import check_sources


def require_inputs(recipe: BaseRecipe) -> None:
    """Check a recipe's text, labeled sets and models before PyTorch is imported and Ray starts.

    Models of the hub and of object storage are not looked up.
    """
    require(input_questions(recipe))
    teachers = [section for section in recipe.inputs.teachers if section.loads_model]
    for section in [*recipe.inputs.encoders, *teachers]:
        if not is_hub_id(section.backbone) and not is_uri(section.backbone):
            resolve_model(section.backbone, only_local=True)


def input_questions(recipe: BaseRecipe, needs_text: bool = True) -> list[Question]:
    """Ask for a recipe's labeled sets, which are not read, and for its text with its column."""
    inputs, questions = recipe.inputs, list[Question]()
    if inputs.labelled is not None or inputs.labelled_for is not None:
        questions.append(("evaluation.data", partial(_find_labelled, inputs)))
    if inputs.corpus is not None and needs_text:
        questions.append(("corpus", partial(_find_text, inputs.corpus)))
    return questions


def _find_labelled(inputs: RecipeInputs) -> str:
    if inputs.labelled is None:
        raise InvalidValueError(f"{inputs.labelled_for}, but evaluation.data is not set; write evaluation.data: FOLDER")
    try:
        folder = labelled_folder(inputs.labelled)
    except LookupError as error:
        raise EvaluationDataError(f"evaluation.data {inputs.labelled}: {error.args[0]}") from None
    if not folder.is_dir():
        raise EvaluationDataError(f"{folder} is not a folder; correct evaluation.data (see docs/how-to/evaluate.md)")
    return inputs.labelled


def _find_text(section: CorpusSection) -> str:
    check_sources(section)
    found = []
    for source in section.all_sources:
        paths = [source.path] if isinstance(source.path, str) else source.path or []
        found += paths if source.dataset is None else [f"data set {source.dataset}, opened when the run starts"]
    return ", ".join(found)
