"""Whether a recipe's models, text and labelled sets are to be had."""

from __future__ import annotations

import os
from pathlib import Path

from distcse.data.readers import find_files
from distcse.errors import CorpusError, EncoderError, RecipeError, StorageError
from distcse.health.check import Check, fail, ok, warn
from distcse.models import resolve_model
from distcse.models.loading import load_tokenizer
from distcse.models.source import is_hub_id
from distcse.models.st_format import refuse_pickled_weights
from distcse.models.vocabulary import has_tokenizer
from distcse.recipe import CorpusSection, EndpointSection, MutualRecipe, Recipe, TeacherSection
from distcse.teachers.custom import open_custom

_PATIENCE = 5.0
"""Seconds to wait for a hub or an endpoint."""


def models(recipe: Recipe | MutualRecipe) -> list[Check]:
    """Each backbone once, or twice where only one of its sections trusts its code."""
    asked: list[tuple[str, bool]] = []
    found: list[Check] = []
    if isinstance(recipe, MutualRecipe):
        for group in recipe.groups:
            names = [name for name in (group.backbone, group.cross_backbone) if name]
            asked += [(name, group.trust_remote_code) for name in names]
    else:
        asked.append((recipe.student.backbone, recipe.student.trust_remote_code))
        for teacher in recipe.teachers.encoders:
            if teacher.endpoint is not None:
                found += endpoint(teacher.backbone, teacher.endpoint)
            elif teacher.class_path is not None:
                found.append(_own(teacher))
            else:
                asked.append((teacher.backbone, teacher.trust_remote_code))
        detection = recipe.objective.detection
        if detection is not None and detection.generator:
            asked.append((detection.generator, False))
    return [check for name, trusts in dict.fromkeys(asked) for check in model(name, trusts)] + found


def model(name: str, trust_remote_code: bool = False) -> list[Check]:
    """A folder with weights and a tokenizer that loads, here or in the hub's cache; else whether the hub has it."""
    try:
        folder = resolve_model(name, trust_remote_code, only_local=True)
        refuse_pickled_weights(folder)
        if is_hub_id(name) and not has_tokenizer(folder):
            return [_on_hub(name, f"{folder} has no tokenizer")]
    except StorageError as refused:
        return [fail("model", str(refused), "or name a folder")]
    except EncoderError as refused:
        return [_on_hub(name, str(refused))]
    try:
        load_tokenizer(folder, trust_remote_code)
    except EncoderError as refused:
        return [fail("model", str(refused), "or name another folder")]
    return [ok("model", f"{name}: {folder}")]


def _own(teacher: TeacherSection) -> Check:
    try:
        open_custom(teacher)
    except RecipeError as refused:
        return fail("model", str(refused), "see docs/extending.md")
    return ok("model", f"{teacher.backbone}: {teacher.class_path} is made")


def _on_hub(name: str, refused: str) -> Check:
    if not is_hub_id(name):
        return fail("model", refused, "name a folder with safetensors, or a hub id")
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        told = f"{name} is in no folder and not in the hub's cache, and HF_HUB_OFFLINE is set"
        return fail("model", told, "unset HF_HUB_OFFLINE, or give a local folder")
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(name, timeout=_PATIENCE)
    except Exception as mistake:  # the hub's client raises a dozen kinds, all of which mean "not to be had"
        told = f"{name} is not in the cache and cannot be had from the hub ({type(mistake).__name__})"
        return fail(
            "model", told, "check the name; a private model wants HF_TOKEN; without a network give a local folder"
        )
    return ok("model", f"{name}: the hub has it; it will be fetched")


def endpoint(name: str, section: EndpointSection) -> list[Check]:
    """Whether something answers at the address."""
    import requests

    key = os.environ.get(section.api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = requests.get(f"{section.url}/models", headers=headers, timeout=_PATIENCE)
    except requests.RequestException as mistake:
        told = f"{name}: {section.url} does not answer ({type(mistake).__name__})"
        return [fail("endpoint", told, "start it, or mend teachers.encoders.N.endpoint.url")]
    if answer.status_code in (401, 403):
        return [
            fail("endpoint", f"{name}: {section.url} refuses ({answer.status_code})", f"export {section.api_key_env}")
        ]
    if answer.status_code >= 500:
        return [warn("endpoint", f"{name}: {section.url} says {answer.status_code}", "look at its log")]
    return [ok("endpoint", f"{name}: {section.url} answers")]


def text(recipe: Recipe | MutualRecipe) -> list[Check]:
    """Files of sentences or pairs, and of labelled sets."""
    found: list[Check] = []
    if isinstance(recipe, Recipe):
        found += _corpus(recipe.corpus)
    elif recipe.pairs.mine is not None:
        found += _corpus(recipe.pairs.mine.corpus)
    elif recipe.pairs.path is not None:
        found += _files("pairs", recipe.pairs.path)
    data = recipe.evaluation.data
    if data is not None:
        there = Path(data).is_dir()
        told = f"{data}{'' if there else ' is no folder'}"
        found.append(
            ok("evaluation.data", told) if there else fail("evaluation.data", told, "write evaluation.data=FOLDER")
        )
    return found


def _corpus(corpus: CorpusSection) -> list[Check]:
    if corpus.path is not None:
        return _files("corpus", corpus.path)
    if corpus.dataset is not None:
        return [ok("corpus", f"data set {corpus.dataset}, opened when the run begins")]
    if corpus.docstrings is not None:
        return [ok("corpus", f"documentation of {', '.join(corpus.docstrings)}")]
    return [fail("corpus", "the recipe names no text", "write corpus.path=FILE")]


def _files(name: str, path: str | list[str]) -> list[Check]:
    try:
        files = find_files([path] if isinstance(path, str) else path)
    except CorpusError as refused:
        return [fail(name, str(refused), f"write {name}.path=FILE")]
    unreadable = next((file for file in files if not os.access(file, os.R_OK)), None)
    if unreadable is not None:
        return [fail(name, f"{unreadable} may not be read", "change its permissions")]
    size = sum(file.stat().st_size for file in files)
    return [ok(name, f"{len(files)} file{'s' if len(files) > 1 else ''}, {size / 1e6:,.1f} MB")]
