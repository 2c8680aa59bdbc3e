"""Find in a second what a recipe names and this machine lacks, before PyTorch is imported and Ray starts."""

from __future__ import annotations

from pathlib import Path

from distcse.data import check_source
from distcse.errors import EvaluationDataError, InvalidValueError
from distcse.model_source import is_hub_id, resolve_model
from distcse.recipe import BaseRecipe
from distcse.storage import is_uri


def require_inputs(recipe: BaseRecipe) -> None:
    """Check that a recipe's text with its columns, its models and its labelled sets are on this machine.

    Models of the hub and of object storage are not looked up, and labelled sets are not read.

    Raises:
        InvalidValueError: A setting needs labelled sets, and the recipe names no folder of them.
        CorpusError: The text is missing, or lacks a column.
        ModelNotFoundError: A model's folder or package is missing.
        EvaluationDataError: A file of pairs or the folder of labelled sets is missing.
    """
    require_labelled(recipe)
    inputs = recipe.inputs
    if inputs.corpus is not None:
        check_source(inputs.corpus)
    for file in [inputs.pairs] if isinstance(inputs.pairs, str) else inputs.pairs or []:
        if not Path(file).is_file():
            raise EvaluationDataError(f"{file} does not exist; correct pairs.path")
    teachers = [section for section in inputs.teachers if section.loads_model]
    for section in [*inputs.encoders, *teachers]:
        if not is_hub_id(section.backbone) and not is_uri(section.backbone):
            resolve_model(section.backbone, only_local=True)
    if inputs.labelled is not None and not Path(inputs.labelled).is_dir():
        raise EvaluationDataError(
            f"{inputs.labelled} is not a folder; correct evaluation.data (see docs/how-to/evaluate.md)"
        )


def require_labelled(recipe: BaseRecipe) -> None:
    """Check that a recipe that needs labelled sets names a folder of them.

    Raises:
        InvalidValueError: A setting needs labelled sets, and `evaluation.data` is null.
    """
    inputs = recipe.inputs
    if inputs.labelled is None and inputs.labelled_for is not None:
        raise InvalidValueError(f"{inputs.labelled_for}, but evaluation.data is not set; write evaluation.data: FOLDER")
