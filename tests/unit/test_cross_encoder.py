"""Cross-encoders compared with sentence-transformers' CrossEncoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from distcse.errors import UnsupportedModelError
from distcse.evaluation import PairScores
from distcse.models import CrossEncoder, is_cross_encoder
from distcse.runs.mutual.pair_task import pair_model
from tests.failures import fails_with
from tests.models import make_cross_encoder


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_scores_equal_those_of_sentence_transformers(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], kind: str
) -> None:
    from sentence_transformers import CrossEncoder as Reference

    folder = make_cross_encoder(tmp_path / "cross", tiny(kind))
    pairs = list(zip(sentences[:40], sentences[40:80], strict=True))
    ours = CrossEncoder.load(folder, max_length=24)
    expected = np.asarray(Reference(str(folder), max_length=24).predict(pairs))
    np.testing.assert_allclose(ours.score(pairs), expected, atol=1e-5)
    np.testing.assert_allclose(ours.score(pairs, batch_tokens=40), ours.score(pairs), atol=1e-6)
    assert is_cross_encoder(folder) and not is_cross_encoder(tiny(kind))
    ours.save(tmp_path / "saved")
    np.testing.assert_allclose(CrossEncoder.load(tmp_path / "saved").score(pairs), ours.score(pairs), atol=1e-6)


def test_half_precision_changes_scores_slightly(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    encoder = CrossEncoder.load(make_cross_encoder(tmp_path, tiny()))
    sides = sentences[:40], sentences[40:80]
    exact, half = (pair_model(encoder, precision).similarities(*sides) for precision in ("fp32", "bf16"))
    assert 0 < np.abs(exact - half).max() < 0.02 and np.isfinite(half).all()


def test_each_pair_is_scored_once(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    progress: list[tuple[int, int]] = []
    model = PairScores(CrossEncoder.load(make_cross_encoder(tmp_path, tiny())), lambda *done: progress.append(done))
    first, second = [*sentences[:5], *sentences[:5]], [*sentences[5:10], *sentences[5:10]]
    scores = model.similarities(first, second)
    assert progress[-1] == (5, 5) and scores[:5].tolist() == scores[5:].tolist()
    assert model.similarities(second[:5], first[:5]).tolist() != scores[:5].tolist()  # the order of a pair counts


def test_a_head_with_several_labels_is_refused(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    with fails_with(UnsupportedModelError, str(tmp_path), "3 labels"):
        CrossEncoder.load(make_cross_encoder(tmp_path, tiny(), labels=3))
