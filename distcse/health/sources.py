"""Checks that a recipe's models, text and labelled sets are available."""

from __future__ import annotations

import os
from pathlib import Path

from distcse.checks import Check, fail, ok
from distcse.compat.hub_client import fix_of_hub_error
from distcse.data.readers import find_files
from distcse.errors import CorpusError, EncoderError, StorageError
from distcse.model_source import is_hub_id
from distcse.models.folder import open_model
from distcse.models.loading import refuse_unpooled_prompt
from distcse.models.vocabulary import has_tokenizer
from distcse.recipe import BaseRecipe, CorpusSection
from distcse.teachers.kinds import kind_of

_TIMEOUT_S = 5.0
"""Seconds to wait for the hub."""


def check_models(recipe: BaseRecipe) -> list[Check]:
    """Check each distinct model with its `trust_remote_code` and prompt, and what the kinds of teachers check themselves."""
    inputs = recipe.inputs
    teachers = [kind_of(section, only_local=True) for section in inputs.teachers]
    sections = [*inputs.encoders, *(kind.section for kind in teachers if kind.is_model)]
    models = dict.fromkeys((section.backbone, section.trust_remote_code, section.prompt) for section in sections)
    checks = [
        *(check for model in models for check in check_model(*model)),
        *(check for kind in teachers for check in kind.check_source()),
    ]
    return list(dict.fromkeys(checks))


def check_model(name: str, trust_remote_code: bool = False, prompt: str = "") -> list[Check]:
    """Check that a model, here or in the hub's cache, would load (see `ModelFolder.check`); else that the hub has it.

    Args:
        name: The model's name in the recipe.
        trust_remote_code: Whether to run the model's Python code.
        prompt: Prompt of its texts. Default: the folder's.
    """
    try:
        folder = open_model(name, trust_remote_code, only_local=True)
        if is_hub_id(name) and not has_tokenizer(folder.backbone):
            return [_check_hub(name, f"{folder.backbone} has no tokenizer")]
    except StorageError as error:
        return [fail("model", str(error), "or use a local folder")]
    except EncoderError as error:
        return [_check_hub(name, str(error))]
    try:
        folder.check()
        refuse_unpooled_prompt(name, folder.layout, prompt)
    except EncoderError as error:
        return [fail("model", str(error), "or use another folder")]
    return [ok("model", f"{name}: {folder.root}")]


def _check_hub(name: str, reason: str) -> Check:
    if not is_hub_id(name):
        return fail("model", reason, "use a folder with safetensors, or a hub id")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        problem = f"{name} is no folder and not in the hub's cache, and HF_HUB_OFFLINE is set"
        return fail("model", problem, "unset HF_HUB_OFFLINE, or use a local folder")
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except Exception as error:  # the hub's client raises errors of many types
        problem = f"{name} is not in the cache and not available on the hub ({type(error).__name__})"
        return fail("model", problem, fix_of_hub_error(error, "use a local folder") or "check the name")
    return ok("model", f"{name}: available on the hub; the run downloads it")


def check_text(recipe: BaseRecipe) -> list[Check]:
    """Check the files of sentences or pairs, and the folder of labelled sets."""
    inputs, found = recipe.inputs, list[Check]()
    if inputs.corpus is not None:
        found += _check_corpus(inputs.corpus)
    if inputs.pairs is not None:
        found += _check_files("pairs", inputs.pairs)
    data = inputs.labelled
    if data is None and inputs.labelled_for is not None:
        found.append(fail("evaluation.data", f"not set, but {inputs.labelled_for}", "set evaluation.data=FOLDER"))
    if data is not None:
        exists = Path(data).is_dir()
        summary = f"{data}{'' if exists else ' is not a folder'}"
        found.append(
            ok("evaluation.data", summary) if exists else fail("evaluation.data", summary, "set evaluation.data=FOLDER")
        )
    return found


def _check_corpus(corpus: CorpusSection) -> list[Check]:
    if corpus.path is not None:
        return _check_files("corpus", corpus.path)
    if corpus.dataset is not None:
        return [ok("corpus", f"data set {corpus.dataset}, opened when the run starts")]
    return [fail("corpus", "the recipe names no text", "set corpus.path=FILE")]


def _check_files(name: str, path: str | list[str]) -> list[Check]:
    try:
        files = find_files([path] if isinstance(path, str) else path)
    except CorpusError as error:
        return [fail(name, str(error), f"set {name}.path=FILE")]
    unreadable = next((file for file in files if not os.access(file, os.R_OK)), None)
    if unreadable is not None:
        return [fail(name, f"{unreadable} is not readable", "change its permissions")]
    size = sum(file.stat().st_size for file in files)
    return [ok(name, f"{len(files)} file{'s' if len(files) > 1 else ''}, {size / 1e6:,.1f} MB")]
