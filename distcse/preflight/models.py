"""Whether a recipe's models are there, and whether its settings fit them, by their configurations and tokenizers."""

from __future__ import annotations

from functools import partial

from distcse.checks import Question
from distcse.compat import fix_of_hub_error
from distcse.errors import EncoderError, ModelNotFoundError
from distcse.model_source import CONFIG_FILE, fetch_from_hub, is_hub_id
from distcse.models import is_static, resolve_model
from distcse.models.folder import ModelFolder, find_local_model, has_tokenizer, open_model
from distcse.models.loading import refuse_unpooled_prompt, require_fit, resolve_pooling
from distcse.recipe import BaseRecipe, EncoderSection, TeacherSection
from distcse.recipe.encoders import TrainedSection
from distcse.teachers.kinds import kind_of

_TIMEOUT_S = 5.0
"""Seconds to wait for the hub."""


def model_questions(recipe: BaseRecipe, fetch: bool = False) -> list[Question]:
    """Ask for each model of a recipe; `fetch` is that of `check_model`."""
    inputs = recipe.inputs
    teachers = [section for section in inputs.teachers if kind_of(section, only_local=True).is_model]
    return [("model", partial(check_model, section, fetch)) for section in (*inputs.encoders, *teachers)]


def check_model(section: EncoderSection, fetch: bool = False) -> str:
    """Check that a model would load, and that the section's settings fit it. Its weights are not read.

    Args:
        section: The recipe's section with the model.
        fetch: Fetch the configuration of a model that is only on the hub, and check the settings by it, as a run does, which
            loads tokenizers with the text. Default: False, ask the hub whether it has the model, and load the tokenizer.

    Returns:
        Where it is.
    """
    name, trusts_code = section.backbone, section.trust_remote_code
    try:
        root = resolve_model(name, trusts_code, only_local=True)
        if is_static(root):
            return f"{name}: {root}"
        folder = open_model(str(root), trusts_code)
    except EncoderError:
        if not is_hub_id(name):
            raise
        return _check_on_hub(section, fetch)
    if is_hub_id(name) and not has_tokenizer(folder.backbone):
        return _check_on_hub(section, fetch)
    if not fetch:
        folder.load_tokenizer()  # first: where config.json is missing too, this error says more
    config = folder.supported_config()
    refuse_unpooled_prompt(section, folder.layout)
    if _is_pooled(section):
        resolve_pooling(section, folder.layout)
        require_fit(section, config)
    return f"{name}: {folder.root}"


def _check_on_hub(section: EncoderSection, fetch: bool) -> str:
    name = section.backbone
    if not fetch:
        _ask_hub(name)
        return f"{name}: available on the hub; the run downloads it"
    root = find_local_model(name, wanted=[CONFIG_FILE]) or fetch_from_hub(name, [CONFIG_FILE], only_local=False)
    # The code of a model that brings its own may not be here yet.
    if _is_pooled(section) and not is_static(root) and not section.trust_remote_code:
        require_fit(section, ModelFolder.read(root).load_config())
    return f"{name}: on the hub"


def _is_pooled(section: EncoderSection) -> bool:
    """Return whether a model makes vectors by itself. A teacher's configuration, which tells it, must be here."""
    if isinstance(section, TeacherSection):
        return kind_of(section, only_local=True).has_vectors
    return isinstance(section, TrainedSection)


def _ask_hub(name: str) -> None:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"{name} is no folder and not in the hub's cache, and HF_HUB_OFFLINE is set; unset HF_HUB_OFFLINE, or use a local "
            "folder"
        )
    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except Exception as error:  # the hub's client raises errors of many types
        raise ModelNotFoundError(
            f"{name} is not in the cache and not available on the hub ({type(error).__name__}); "
            f"{fix_of_hub_error(error, 'use a local folder') or 'check the name'}"
        ) from error
