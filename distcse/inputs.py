"""Find what a recipe names and this machine or the hub lacks, before a run has a folder."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants

from distcse.data import check_source
from distcse.errors import EvaluationDataError
from distcse.model_source import CONFIG_FILE, fetch_from_hub, is_hub_id, resolve_model
from distcse.recipe import BaseRecipe
from distcse.storage import is_uri


def require_inputs(recipe: BaseRecipe) -> None:
    """Check in a second that a recipe's text with its columns, its models and its labelled sets are on this machine.

    Called before PyTorch is imported and Ray starts. Models of object storage are not looked up, those of the hub neither
    (see `require_hub_models`), and labelled sets are not read.

    Raises:
        CorpusError: The text is missing, or lacks a column.
        ModelNotFoundError: A model's folder or package is missing.
        EvaluationDataError: A file of pairs or the folder of labelled sets is missing.
    """
    inputs = recipe.inputs
    if inputs.corpus is not None:
        check_source(inputs.corpus)
    for file in [inputs.pairs] if isinstance(inputs.pairs, str) else inputs.pairs or []:
        if not Path(file).is_file():
            raise EvaluationDataError(f"{file} does not exist; correct pairs.path")
    for name in _models(recipe):
        if not is_hub_id(name) and not is_uri(name):
            resolve_model(name, only_local=True)
    if inputs.labelled is not None and not Path(inputs.labelled).is_dir():
        raise EvaluationDataError(
            f"{inputs.labelled} is not a folder; correct evaluation.data (see docs/how-to/evaluate.md)"
        )


def require_hub_models(recipe: BaseRecipe) -> None:
    """Check that a recipe's models are on the hub, by fetching their configurations, or with HF_HUB_OFFLINE=1 in its cache.

    Raises:
        ModelNotFoundError: A model is missing.
    """
    for name in dict.fromkeys(_models(recipe)):
        if is_hub_id(name) and not is_uri(name):
            fetch_from_hub(name, [CONFIG_FILE], only_local=constants.HF_HUB_OFFLINE)


def _models(recipe: BaseRecipe) -> list[str]:
    """Return the models that a recipe's encoders and teachers are loaded from."""
    inputs = recipe.inputs
    teachers = [section for section in inputs.teachers if section.endpoint is None and section.class_path is None]
    return [section.backbone for section in (*inputs.encoders, *teachers)]
