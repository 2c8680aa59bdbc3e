"""Selection of a student's initial layers from its backbone: those that agree best with the teachers before training.

The selection is cached, so that trials, seeds and resumed runs of the same student start from the same layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.devices.device import default_device
from distcse.errors import EncoderSettingError, UnsuitableTeacherError
from distcse.evaluation import agreement
from distcse.events import Reporter, StageProgress
from distcse.losses import mix_lists
from distcse.models import Encoder, depth_of, model_fingerprint, needs_first_layer, only_layers
from distcse.recipe import Recipe, TeacherSection, with_layers
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import model_memory
from distcse.runs.distillation.processes import student_needs
from distcse.storage import ArtifactStore, content_key, open_store
from distcse.teachers.kinds import kind_of
from distcse.text import Corpus

_FORMAT = 1
_SENTENCES = 512
"""Sentences on which the layers are compared."""
_MAX_EXHAUSTIVE = 64
"""Up to this many combinations, all are scored."""
_SEED = 2**32 - 3
"""Seed for sampling the sentences; independent of the recipe's seed, so that all seeds start from the same student."""

Score = Callable[[Sequence[int]], float]
"""Scores the student that consists of these layers; higher is better."""


def with_chosen_layers(recipe: Recipe, corpus: Corpus, backend: Backend, reporter: Reporter) -> Recipe:
    """Return the recipe with `student.layers: auto` replaced by the selected layers.

    The selected layers rank 512 sentences of the corpus most like the teachers do.

    Args:
        recipe: The recipe; returned unchanged if it names its layers.
        corpus: Its sentences.
        backend: Where the combinations are compared.
        reporter: Receives the progress of the search.

    Raises:
        EncoderSettingError: The backbone has fewer layers than student.num_layers.
        UnsuitableTeacherError: No teacher gives vectors.
    """
    if recipe.student.layers != "auto":
        return recipe
    cache = open_store(recipe.storage.cache)
    name = f"layers/{_key(recipe, corpus)}.json"
    with suppress(OSError, ValueError):  # damaged: searching again selects the same layers
        if (stored := cache.read_json(name)) is not None:
            cached: list[int] = stored["layers"]
            _report(reporter, cached, "selected by an earlier run")
            return with_layers(recipe, cached)
    teachers = [teacher for teacher in recipe.teachers.encoders if teacher.loads_model]
    memory = max(model_memory(model.backbone) for model in (recipe.student, *teachers))
    call = DeviceCall("layer selection", partial(_search, recipe, open_store(corpus.directory)), memory)
    ((layers, score, tried),) = backend.run_on_devices([call], student_needs(recipe).options(), reporter)
    cache.write_json(name, {"layers": layers, "agreement": score, "tried": tried})
    _report(reporter, layers, f"agreement {score:.2f} before training, the best of {len(tried)} combinations")
    return with_layers(recipe, layers)


def best_layers(depth: int, count: int, score: Score, with_first: bool = False) -> dict[tuple[int, ...], float]:
    """Search for the best `count` of `depth` layers.

    Up to 64 combinations are all scored. With more, layers are removed greedily: each time the one without which the
    remaining layers score best.

    Args:
        depth: Number of layers to select from.
        count: Number of layers to select.
        score: Scores a selection.
        with_first: Consider only selections that include layer 0.

    Returns:
        Scored selections of `count` layers, the best one among them.
    """

    def subsets(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
        return [subset for subset in combinations(layers, size) if not with_first or subset[0] == 0]

    if comb(depth, count) <= _MAX_EXHAUSTIVE:
        return {subset: score(subset) for subset in subsets(range(depth), count)}
    remaining = tuple(range(depth))
    tried: dict[tuple[int, ...], float] = {}
    while len(remaining) > count:
        tried = {subset: score(subset) for subset in subsets(remaining, len(remaining) - 1)}
        remaining = max(tried, key=lambda subset: tried[subset])
    return tried


def _search(
    recipe: Recipe, prepared: ArtifactStore, reporter: Reporter
) -> tuple[list[int], float, list[tuple[list[int], float]]]:
    """Return the best layers, their score, and all scored selections, best first. `prepared` is the corpus's folder."""
    corpus = Corpus.open(prepared.path)
    section, count = recipe.student, recipe.student.num_layers
    assert count is not None
    full_section = section.model_copy(update={"layers": None, "num_layers": None, "embedding_size": None})
    encoder = Encoder.from_section(full_section).to(default_device())
    depth = depth_of(encoder.backbone)
    if count > depth:
        raise EncoderSettingError(
            f"student.num_layers is {count}, but {section.backbone} has {depth} layers; write at most {depth}"
        )
    teachers = [teacher for teacher in recipe.teachers.encoders if kind_of(teacher).has_vectors]
    if not teachers:
        raise UnsuitableTeacherError(
            "student.layers: auto needs a teacher that gives vectors; list the layers, such as [0, 2, 4]"
        )
    texts = corpus.texts(np.sort(np.random.default_rng(_SEED).permutation(len(corpus))[:_SENTENCES]))

    def ask(done: int) -> None:
        reporter.check_stop("in the selection of layers")

    similarities = _mean_similarities(teachers, texts, ask)
    done = 0

    def score(layers: Sequence[int]) -> float:
        nonlocal done
        with only_layers(encoder.backbone, layers):
            result = agreement(encoder.encode(texts, normalize=True, on_progress=ask), similarities)
        done += 1
        reporter.advance("layers", done, None, "combinations tried")
        return result

    tried = best_layers(depth, count, score, needs_first_layer(encoder.backbone))
    best = max(tried, key=lambda layers: tried[layers])
    in_order = sorted(tried.items(), key=lambda entry: -entry[1])
    return list(best), tried[best], [(list(layers), round(result, 2)) for layers, result in in_order]


def _mean_similarities(
    teachers: Sequence[TeacherSection], texts: Sequence[str], on_progress: Callable[[int], None]
) -> NDArray[np.float32]:
    """Return the (n, n) mean cosines of n texts over the teachers, weighted by the recipe."""
    similarities = []
    for teacher in map(kind_of, teachers):
        embedder = teacher.open_embedder()
        units = embedder.encode(texts, normalize=True, precision=teacher.precision, on_progress=on_progress)
        similarities.append(units @ units.T)
    weights = [teacher.alpha for teacher in teachers]
    mean: NDArray[np.float32] = mix_lists(torch.from_numpy(np.stack(similarities)), weights).numpy()
    return mean


def _key(recipe: Recipe, corpus: Corpus) -> str:
    """Hash all inputs of the selection."""
    student = recipe.student
    settings = student.model_dump(mode="json", include={"pooling", "max_length", "prompt", "num_layers"})
    teachers = [
        [kind_of(teacher).source_fingerprint(), teacher.model_dump(mode="json")] for teacher in recipe.teachers.encoders
    ]
    backbone = model_fingerprint(student.backbone, student.trust_remote_code)
    inputs = [_FORMAT, backbone, settings, teachers, corpus.fingerprint]
    return content_key(inputs)


def _report(reporter: Reporter, layers: Sequence[int], note: str) -> None:
    reporter.emit(
        StageProgress("layers", len(layers), len(layers), "layers", finished=True, note=f"{list(layers)}: {note}")
    )
