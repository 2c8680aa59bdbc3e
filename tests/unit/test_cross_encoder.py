"""Cross-encoders have sentence-transformers' scores and activations; a start with other labels gets a new head."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from distcse.errors import ArgumentError, ModelFormatError, UnsupportedModelError
from distcse.evaluation import PairScores
from distcse.models import CrossEncoder, is_cross_encoder
from distcse.recipe import TeacherSection
from distcse.runs.mutual.pair_task import pair_model
from distcse.teachers.kinds import kind_of
from tests.failures import fails_with
from tests.models import change_json, make_cross_encoder

PAIRS = [("A man.", "A child"), ("The cat sees.", "A man is playing.")]
SETTINGS = "config_sentence_transformers.json"


@pytest.fixture(scope="module")
def scorer(tiny_cross: Path) -> CrossEncoder:
    """Return a cross-encoder that no test changes."""
    return CrossEncoder.load(tiny_cross)


@pytest.fixture(scope="module")
def theirs(tiny_cross: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that sentence-transformers wrote, which no test changes."""
    from sentence_transformers import CrossEncoder as Theirs

    folder = tmp_path_factory.mktemp("theirs") / "cross"
    Theirs(str(tiny_cross), device="cpu").save_pretrained(str(folder))
    return folder


def their_scores(folder: Path, pairs: list[tuple[str, str]] = PAIRS, **settings: Any) -> Any:
    from sentence_transformers import CrossEncoder as Theirs

    return Theirs(str(folder), device="cpu", **settings).predict(pairs, show_progress_bar=False)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_scores_equal_those_of_sentence_transformers(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], kind: str
) -> None:
    folder = make_cross_encoder(tmp_path / "cross", tiny(kind))
    pairs = list(zip(sentences[:40], sentences[40:80], strict=True))
    ours = CrossEncoder.load(folder, max_length=24)
    np.testing.assert_allclose(ours.score(pairs), their_scores(folder, pairs, max_length=24), atol=1e-5)
    np.testing.assert_allclose(ours.score(pairs, batch_tokens=40), ours.score(pairs), atol=1e-6)
    assert is_cross_encoder(folder) and not is_cross_encoder(tiny(kind))
    ours.save(tmp_path / "saved")
    np.testing.assert_allclose(CrossEncoder.load(tmp_path / "saved").score(pairs), ours.score(pairs), atol=1e-6)


@pytest.mark.parametrize(
    ("file", "values", "activation"),
    [
        (SETTINGS, {"activation_fn": "torch.nn.modules.linear.Identity"}, "Identity"),
        (SETTINGS, {"activation_fn": "torch.nn.modules.activation.Tanh"}, "Tanh"),
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.Identity", "version": "4"}}, "Identity"),
        ("config.json", {"sentence_transformers": {"version": "4.1.0.dev0"}}, "Sigmoid"),
        ("config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "Identity"),
    ],
)
def test_an_activation_is_that_of_sentence_transformers(
    file: str, values: dict[str, Any], activation: str, theirs: Path, tmp_path: Path
) -> None:
    cross = shutil.copytree(theirs, tmp_path / "cross")
    if file != SETTINGS:
        for name in ("modules.json", SETTINGS):  # which only versions after 5.3 write
            (cross / name).unlink()
    change_json(cross / file, **values)
    ours, expected = CrossEncoder.load(cross), their_scores(cross)
    assert ours.activation.endswith(activation)
    np.testing.assert_allclose(ours.score(PAIRS), expected, atol=1e-5)
    ours.save(tmp_path / "saved")
    np.testing.assert_allclose(their_scores(tmp_path / "saved"), expected, atol=1e-5)
    np.testing.assert_allclose(CrossEncoder.load(tmp_path / "saved").score(PAIRS), expected, atol=1e-5)
    CrossEncoder.fresh(cross, 16).save(tmp_path / "fresh")  # which learns probabilities
    assert CrossEncoder.load(tmp_path / "fresh").activation.endswith("Sigmoid")


def test_prompts_labels_and_other_activations_are_refused(
    theirs: Path, tiny_cross: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    prompted, cross = (shutil.copytree(source, tmp_path / source.name) for source in (theirs, tiny_cross))
    change_json(prompted / SETTINGS, prompts={"query": "Given: "}, default_prompt_name="query")
    with fails_with(UnsupportedModelError, "Given: "):
        CrossEncoder.load(prompted)
    labels = make_cross_encoder(tmp_path / "labels", tiny(), labels=3)
    with fails_with(UnsupportedModelError, str(labels), "3 labels"):
        CrossEncoder.load(labels)
    for activation in ("torch.nn.modules.activation.Softplus", "torch.sigmoid", 3):
        change_json(cross / "config.json", sentence_transformers={"activation_fn": activation})
        with fails_with(UnsupportedModelError, repr(activation), "Identity"):
            CrossEncoder.load(cross)
        (check,) = kind_of(TeacherSection(backbone=str(cross))).check_source()
        assert check.verdict == "fail" and repr(activation) in check.found


def test_a_start_with_other_labels_gets_a_new_head(tiny: Callable[..., Path], tmp_path: Path) -> None:
    start = make_cross_encoder(tmp_path / "nli", tiny("roberta"), labels=3)
    weights, head = load_file(start / "model.safetensors"), "classifier.out_proj.weight"
    assert len(weights[head]) == 3
    torch.manual_seed(5)
    fresh = CrossEncoder.fresh(start, 16)
    assert fresh.model.config.num_labels == 1
    named = dict(fresh.model.named_parameters())
    assert named[head].shape == (1, 32)
    assert 0.005 < float(named[head].detach().std()) < 0.05  # initializer_range is 0.02
    others = [name for name in weights if not name.startswith("classifier")]
    assert len(others) > 30 and all(torch.equal(named[name], weights[name]) for name in others)
    torch.manual_seed(5)
    assert torch.equal(named[head], dict(CrossEncoder.fresh(start, 16).model.named_parameters())[head])
    fresh.save(tmp_path / "saved")
    saved = CrossEncoder.load(tmp_path / "saved", 16)
    assert all(torch.equal(weight, named[name]) for name, weight in saved.model.named_parameters())
    np.testing.assert_allclose(saved.score(PAIRS), fresh.eval().score(PAIRS), rtol=1e-6)
    change_json(start / "config.json", intermediate_size=48)
    with fails_with(ModelFormatError, "weights do not have the shape", "48"):
        CrossEncoder.fresh(start, 16)


def test_half_precision_changes_scores_slightly(scorer: CrossEncoder, sentences: list[str]) -> None:
    sides = sentences[:40], sentences[40:80]
    exact, half = (pair_model(scorer, precision).similarities(*sides) for precision in ("fp32", "bf16"))
    assert 0 < np.abs(exact - half).max() < 0.02 and np.isfinite(half).all()


def test_each_pair_is_scored_once(scorer: CrossEncoder, sentences: list[str]) -> None:
    progress: list[tuple[int, int]] = []
    model = PairScores(scorer, lambda *done: progress.append(done))
    first, second = [*sentences[:5], *sentences[:5]], [*sentences[5:10], *sentences[5:10]]
    scores = model.similarities(first, second)
    assert progress[-1] == (5, 5) and scores[:5].tolist() == scores[5:].tolist()
    assert model.similarities(second[:5], first[:5]).tolist() != scores[:5].tolist()  # the order of a pair counts


def test_pairs_come_in_any_container(scorer: CrossEncoder) -> None:
    containers: list[Callable[[Any], Any]] = [tuple, iter, np.array, lambda pairs: [list(pair) for pair in pairs]]
    for container in containers:
        np.testing.assert_array_equal(scorer.score(container(PAIRS)), scorer.score(PAIRS))
    assert scorer.score([]).shape == (0,)


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        (("ab", "cd"), ["pairs[0]", "'ab'", "[(first, second)]"]),
        ("ab", ["str", "[(first, second)]"]),
        ([("a", "b"), ("a", None)], ["pairs[1]", "None", "[(first, second)]"]),
        ([("a", "b", "c")], ["pairs[0]"]),
        ([("a", "\ud83d")], ["pairs[0]", "surrogate"]),
        (None, ["NoneType"]),
    ],
)
def test_what_is_no_pair_is_refused_with_its_place(pairs: Any, named: list[str], scorer: CrossEncoder) -> None:
    with fails_with(ArgumentError, *named):
        scorer.score(pairs)
