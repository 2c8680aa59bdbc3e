"""Models to measure, opened from what a user names: a folder, a run, a name on the hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.device import speed_of
from distcse.errors import EvaluationOptionError
from distcse.evaluation.contamination import Contamination
from distcse.evaluation.evaluation import Candidate, ModelInfo
from distcse.evaluation.models import PairScores, Progress, RankSpaceModel, VectorModel, encoding
from distcse.evaluation.runs import numbered
from distcse.models import CrossEncoder, Encoder, is_cross_encoder, resolve_model
from distcse.models.fast.mkldnn_linear import use_mkldnn_linear
from distcse.models.st_format import default_pooling
from distcse.rank_space import RankSpaceEncoder, is_rank_space
from distcse.storage import model_of


@dataclass(frozen=True)
class LoadOptions:
    """How models are loaded and run.

    Args:
        pooling: Of folders that do not say how they pool; those that do are read as they say.
        max_length: Tokens kept of a sentence; None follows the folder.
        device: Where models run.
        precision: `fp32`, or `bf16` / `fp16` autocast; `auto` is bf16 where the device is fast at it, else fp32.
        trust_remote_code: Run code that a model folder brings.
        prompt: Text before every sentence, or a template with `{sentence}` in it; empty follows the folder.
            A cross-encoder takes none.
    """

    pooling: str | None = None
    max_length: int | None = None
    device: str = "cpu"
    precision: str = "auto"
    trust_remote_code: bool = False
    prompt: str = ""

    @property
    def decided_precision(self) -> str:
        """`precision`, where it is `auto` what the device is fast at."""
        return speed_of(self.device).precision if self.precision == "auto" else self.precision


def named(models: Sequence[str]) -> dict[str, str]:
    """Models by name: `NAME=MODEL`, or the name of the folder; a folder called `model` has its parent's name.

    A NAME that is given to several models makes them its runs: `NAME, run 1` and so on.

    Raises:
        EvaluationError: Two models of one name that nobody gave them, or one model twice.
    """
    found: dict[str, list[str]] = {}
    for text in models:
        name, equals, path = text.partition("=")
        if not path if equals else not name:
            raise EvaluationOptionError(f"{text!r} names no model; write MODEL or NAME=MODEL")
        if not equals or os.path.isdir(text):  # runs/lr=3e-5/model is a path
            name, equals, path = _name_of(text), "", text
        others = found.setdefault(name, [])
        if path in others or (others and not equals):
            raise EvaluationOptionError(f"two models are called {name}; name one: NAME={path}")
        others.append(path)
    return numbered(found)


def open_candidate(name: str, source: str, reading: LoadOptions, on_progress: Progress | None = None) -> Candidate:
    """Load a model; a run directory stands for the student in it.

    Raises:
        EncoderError: It does not load, or is a run with several models or with none yet.
        EvaluationError: A rank space that shall be read otherwise than it was made.
    """
    folder = resolve_model(model_of(source), reading.trust_remote_code)
    if is_cross_encoder(folder):
        scorer = CrossEncoder.load(folder, reading.max_length, reading.trust_remote_code).to(reading.device)
        pairs = scorer_of(name, source, scorer, Contamination.read(folder), reading.decided_precision, on_progress)
        use_mkldnn_linear(scorer, reading.decided_precision)
        return pairs
    if is_rank_space(folder):
        ranker = _ranker(folder, source, reading)
        about = ModelInfo(
            name,
            source,
            f"rank space, λ = {ranker.weight:g}",
            ranker.encoder.pooling,
            ranker.encoder.max_length,
            _parameters(ranker.encoder),
        )
        use_mkldnn_linear(ranker.encoder, reading.decided_precision)
        model = RankSpaceModel(ranker, encoding(ranker.encoder, reading.decided_precision, on_progress))
        return Candidate(about, model, Contamination.read(folder))
    knobs: dict[str, Any] = {
        "max_length": reading.max_length,
        "trust_remote_code": reading.trust_remote_code,
        "prompt": reading.prompt,
    }
    pooling = default_pooling(folder, reading.pooling)
    encoder = Encoder.load(folder, pooling=pooling, **knobs).to(reading.device)
    vectors = candidate_of(name, source, encoder, Contamination.read(folder), reading.decided_precision, on_progress)
    use_mkldnn_linear(encoder, reading.decided_precision)
    return vectors


def candidate_of(
    name: str,
    source: str,
    encoder: Encoder,
    exposure: Contamination,
    precision: str = "fp32",
    on_progress: Progress | None = None,
) -> Candidate:
    """A candidate of an encoder that is loaded already."""
    about = ModelInfo(name, source, "bi-encoder", encoder.pooling, encoder.max_length, _parameters(encoder))
    return Candidate(about, VectorModel.of(encoder, precision, on_progress), exposure)


def scorer_of(
    name: str,
    source: str,
    encoder: CrossEncoder,
    exposure: Contamination,
    precision: str = "fp32",
    on_progress: Progress | None = None,
) -> Candidate:
    """A candidate of a cross-encoder that is loaded already."""
    about = ModelInfo(name, source, "cross-encoder", "pair", encoder.max_length, _parameters(encoder))
    return Candidate(about, PairScores(encoder, on_progress, precision), exposure)


def _ranker(folder: Path, source: str, reading: LoadOptions) -> RankSpaceEncoder:
    """A rank space, whose references were encoded by what its folder says."""
    ranker = RankSpaceEncoder.load(folder, reading.trust_remote_code).to(reading.device)
    saved = ranker.encoder.max_length, ranker.encoder.prompt
    if (reading.max_length or saved[0], reading.prompt or saved[1]) != saved:
        raise EvaluationOptionError(
            f"{source} ranks among references that were encoded with max_length {saved[0]} and prompt {saved[1]!r}, and "
            "sentences are read as they were; leave out --max-length and --prompt, or make it anew of another encoder"
        )
    return ranker


def _parameters(model: Any) -> int:
    return sum(weights.numel() for weights in model.parameters())


def _name_of(path: str) -> str:
    parts = Path(path).absolute().parts if os.path.exists(path) else Path(path.rstrip("/")).parts
    return parts[-2] if parts[-1] == "model" and len(parts) > 1 else parts[-1]
