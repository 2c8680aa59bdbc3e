"""Which of a backbone's layers a student begins with: those that agree best with its teachers before anything is learned.

The choice is kept in the cache, so that trials, seeds and resumed runs of the same student begin alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.data import Corpus
from distcse.device import default_device
from distcse.errors import EncoderSettingError, UnsuitableTeacherError
from distcse.evaluation import agreement
from distcse.events import Reporter, StageProgress
from distcse.files import dump_checked_json, load_checked_json, storage_errors, text_checksum
from distcse.losses import mix_lists
from distcse.models import Encoder, depth_of, first_stays, model_fingerprint, only_layers, resolve_model
from distcse.recipe import Recipe, TeacherSection, with_layers
from distcse.storage import fetch, resolve_path, write_text_atomic
from distcse.teachers.factory import fingerprint, open_embedder, scores_pairs
from distcse.teachers.teacher_weights import TeacherWeights
from distcse.trainer import allocator

_FORMAT = 1
_SENTENCES = 512
_FEWEST = 3
"""Sentences: a list of one other has no order."""
_MOST_TRIED = 64
_STREAM = 2**32 - 3
"""Seed of the sentences' draw: another seed of the recipe is no reason for another student."""

Score = Callable[[Sequence[int]], float]


def with_chosen_layers(recipe: Recipe, corpus: Corpus, reporter: Reporter) -> Recipe:
    """The recipe with its student's layers named, where it says `auto`: those that order 512 sentences most as teachers do.

    Raises:
        EncoderError: The backbone has not as many layers.
        TeacherError: No teacher gives vectors.
    """
    if recipe.student.layers != "auto":
        return recipe
    kept = resolve_path(recipe.storage.cache) / "layers" / f"{_key(recipe, corpus)}.json"
    fetch(kept)
    with suppress(OSError, ValueError):  # absent or damaged: chosen anew, and alike
        chosen: list[int] = load_checked_json(kept)["layers"]
        _told(reporter, chosen, "as an earlier run chose")
        return with_layers(recipe, chosen)
    layers, score, tried = _search(recipe, corpus, reporter)
    allocator.release_memory()  # its models; the workers may be on the same GPU
    with storage_errors(kept):
        kept.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(kept, dump_checked_json({"layers": layers, "agreement": score, "tried": tried}))
    _told(reporter, layers, f"agreement {score:.2f} at the start, the best of {len(tried)} choices")
    return with_layers(recipe, layers)


def best_layers(depth: int, wanted: int, score: Score, with_first: bool = False) -> dict[tuple[int, ...], float]:
    """Choices of `wanted` out of `depth` layers, with their scores: all of them where there are at most 64.

    Of more, layers are left out one after the other, each time the one without which the others score best; only choices of the
    wanted number are returned, and `with_first` only such as keep the first layer.
    """

    def choices(kept: Sequence[int], number: int) -> list[tuple[int, ...]]:
        return [choice for choice in combinations(kept, number) if not with_first or choice[0] == 0]

    if comb(depth, wanted) <= _MOST_TRIED:
        return {choice: score(choice) for choice in choices(range(depth), wanted)}
    kept = tuple(range(depth))
    tried: dict[tuple[int, ...], float] = {}
    while len(kept) > wanted:
        tried = {shorter: score(shorter) for shorter in choices(kept, len(kept) - 1)}
        kept = max(tried, key=lambda choice: tried[choice])
    return tried


def _search(
    recipe: Recipe, corpus: Corpus, reporter: Reporter
) -> tuple[list[int], float, list[tuple[list[int], float]]]:
    section, wanted = recipe.student, recipe.student.num_layers
    assert wanted is not None
    whole = section.model_copy(update={"layers": None, "num_layers": None, "embedding_size": None})
    encoder = Encoder.from_section(whole).to(default_device())
    depth = depth_of(encoder.backbone)
    if wanted > depth:
        raise EncoderSettingError(
            f"student.num_layers is {wanted}, but {section.backbone} has {depth} layers; write at most {depth}"
        )
    rows, numbers, weights = _weighed(recipe, corpus)
    texts = corpus.texts(rows)
    lists = _lists([recipe.teachers.encoders[number] for number in numbers], weights, texts)
    done = 0

    def score(layers: Sequence[int]) -> float:
        nonlocal done
        with only_layers(encoder.backbone, layers):
            found = agreement(encoder.encode(texts, normalize=True), lists)
        done += 1
        reporter.emit(StageProgress("layers", done, None, "choices tried"))
        return found

    tried = best_layers(depth, wanted, score, first_stays(encoder.backbone))
    best = max(tried, key=lambda choice: tried[choice])
    in_order = sorted(tried.items(), key=lambda entry: -entry[1])
    return list(best), tried[best], [(list(layers), round(found, 2)) for layers, found in in_order]


def _weighed(recipe: Recipe, corpus: Corpus) -> tuple[NDArray[np.int64], list[int], Tensor]:
    """(n,) rows that are asked for, numbers of the T teachers that give vectors, and their (T, n) weights, never all 0."""
    teachers = recipe.teachers.encoders
    numbers = [number for number, teacher in enumerate(teachers) if not scores_pairs(teacher)]
    if not numbers:
        raise UnsuitableTeacherError(
            "student.layers: auto wants a teacher that gives vectors; name the layers, such as [0, 2, 4]"
        )
    rows = np.sort(np.random.default_rng(_STREAM).permutation(len(corpus))[:_SENTENCES])
    weights = torch.as_tensor(TeacherWeights(teachers, corpus).of(rows), dtype=torch.float64)
    weights = (weights if weights.ndim > 1 else weights[:, None].expand(-1, len(rows)))[numbers]
    heard = (weights > 0).any(dim=0)
    if heard.sum() < _FEWEST:
        raise UnsuitableTeacherError(
            "student.layers: auto wants a teacher that gives vectors, and by alpha_by_domain none counts in what it asks for; "
            "name the layers, such as [0, 2, 4]"
        )
    return rows[heard.numpy()], numbers, weights[:, heard]


def _lists(teachers: Sequence[TeacherSection], weights: Tensor, texts: Sequence[str]) -> NDArray[np.float32]:
    """(n, n) mean cosines of teachers with (T, n) weights."""
    lists = []
    for teacher in teachers:
        units = open_embedder(teacher).encode(texts, normalize=True, precision=teacher.forward_precision)
        lists.append(units @ units.T)
    mixed: NDArray[np.float32] = mix_lists(torch.from_numpy(np.stack(lists)), weights).numpy()
    return mixed


def _key(recipe: Recipe, corpus: Corpus) -> str:
    """Of all that decides the choice."""
    student = recipe.student
    reading = student.model_dump(mode="json", include={"pooling", "max_length", "prompt", "num_layers"})
    teachers = [[fingerprint(teacher), teacher.model_dump(mode="json")] for teacher in recipe.teachers.encoders]
    backbone = model_fingerprint(resolve_model(student.backbone, student.trust_remote_code))
    described = [_FORMAT, backbone, reading, teachers, corpus.content]
    return text_checksum(json.dumps(described))


def _told(reporter: Reporter, layers: Sequence[int], why: str) -> None:
    reporter.emit(
        StageProgress("layers", len(layers), len(layers), "layers", finished=True, note=f"{list(layers)}: {why}")
    )
