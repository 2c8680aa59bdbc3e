"""Dense modules after pooling and cross-encoders: loaded, trained and saved as in sentence-transformers; others are refused."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from distcse.errors import (
    ArgumentError,
    EncoderError,
    ModelFormatError,
    NotFiniteError,
    PickledWeightsError,
    UnsupportedModelError,
)
from distcse.evaluation import PairScores
from distcse.events import Reporter
from distcse.models import CrossEncoder, Encoder, is_cross_encoder
from distcse.models.detection import build_detector
from distcse.models.pooling import Normalize
from distcse.planning.sizes import read_shape
from distcse.recipe import DetectionSection, EncoderSection, TeacherSection
from distcse.runs.mutual.pair_task import pair_model
from distcse.teachers.kinds import kind_of
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import assert_saved_alike, change_json, make_cross_encoder, their_vectors

TEXTS = ["A man is playing a guitar.", "The cat sees nothing at all.", "A child"]
ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.GELU, nn.Identity)
"""All that a folder may name."""
Make = Callable[..., Path]


def write_model(folder: Path, source: Path, *modules: nn.Module) -> Path:
    """Write a folder with sentence-transformers: an encoder of hidden size 32, mean pooling, and the given modules."""
    from sentence_transformers import SentenceTransformer

    Encoder.load(source, pooling="mean", max_length=16).save(folder / "plain")
    model = SentenceTransformer(str(folder / "plain"), device="cpu")
    for module in modules:
        model.append(module)
    model.save(str(folder / "theirs"))
    return folder / "theirs"


@pytest.fixture(scope="module")
def narrow(tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Dense of 8 dimensions in 2_Dense, which no test changes."""
    return write_model(tmp_path_factory.mktemp("narrow"), tiny(), dense(32, 8))


@pytest.fixture
def with_head(narrow: Path, tmp_path: Path) -> Path:
    """Return a copy of a folder with a Dense of 8 dimensions in 2_Dense."""
    return shutil.copytree(narrow, tmp_path / "theirs")


def dense(inputs: int, outputs: int, **settings: Any) -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(inputs * outputs)
    module: nn.Module = Dense(inputs, outputs, **settings)
    return module


def norm() -> nn.Module:
    from sentence_transformers.sentence_transformer.modules import Normalize

    module: nn.Module = Normalize()
    return module


@pytest.mark.parametrize(
    ("kind", "modules", "dimension", "normalize"),
    [
        pytest.param("bert", lambda: [dense(32, 32), norm()], 32, True, id="LaBSE"),
        pytest.param(
            "t5", lambda: [dense(32, 8, bias=False, activation_function=nn.Identity()), norm()], 8, True, id="GTR"
        ),
        pytest.param("bert", lambda: [dense(32, 96), dense(96, 16, bias=False), norm()], 16, True, id="EmbeddingGemma"),
        pytest.param(
            "bert",
            lambda: [norm(), *(dense(32, 32, activation_function=kind()) for kind in ACTIVATIONS)],
            32,
            False,
            id="normalized first",
        ),
        pytest.param(
            "bert", lambda: [dense(32, 8, use_residual=True), dense(8, 8, use_residual=True)], 8, False, id="residual"
        ),
    ],
)
def test_vectors_equal_those_of_sentence_transformers(
    kind: str, modules: Callable[[], list[nn.Module]], dimension: int, normalize: bool, tiny: Make, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, tiny(kind), *modules())
    encoder = Encoder.load(folder)
    assert (encoder.dimension, encoder.normalize) == (dimension, normalize)
    np.testing.assert_allclose(encoder.encode(TEXTS), their_vectors(folder, TEXTS), atol=1e-5)
    # The same weights, elsewhere in memory: T5's kernels of an AVX2 CPU then round otherwise, by up to 1.07e-6.
    assert_saved_alike(encoder, tmp_path / "ours", TEXTS, atol=2e-6)
    shape = read_shape(EncoderSection(backbone=str(folder)))
    assert shape.dimension == dimension
    weights = {name: weight.numel() for name, weight in encoder.named_parameters() if ".pooler." not in name}
    assert shape.parameters == sum(weights.values())


def test_a_normalized_zero_vector_stays_zero_without_gradient() -> None:
    vectors = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    vectors[1] = 0.0
    weights = torch.arange(8.0)
    found, expected = vectors.clone().requires_grad_(), vectors.double().requires_grad_()
    normalized = Normalize()(found)
    (normalized @ weights).sum().backward()
    (nn.functional.normalize(expected[[0, 2]], dim=1) @ weights.double()).sum().backward()
    assert found.grad is not None and expected.grad is not None
    assert not normalized[1].any() and not found.grad[1].any()
    torch.testing.assert_close(found.grad[[0, 2]].double(), expected.grad[[0, 2]], atol=1e-5, rtol=0)


def test_a_head_is_trained_with_its_encoder_and_saved(
    with_head: Path, tiny: Make, tmp_path: Path, sentences: list[str]
) -> None:
    evaluation = "evaluation={dev: none, num_heldout: 0, final_suites: []}"
    overrides = ("student.pooling=null", "student.layers=null", "training.max_steps=3", evaluation)
    recipe = make_recipe(tmp_path, with_head, [tiny("minilm")], sentences[:64], *overrides)
    model = run(recipe, Reporter()).directory.model
    before, saved = Encoder.load(with_head), Encoder.load(model)
    assert saved.dimension == 8
    assert not torch.equal(saved.head[0].linear.weight, before.head[0].linear.weight)  # type: ignore[union-attr, arg-type]
    np.testing.assert_allclose(their_vectors(model, TEXTS), saved.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "kind", "named"),
    [
        ({"activation_function": "os.system"}, UnsupportedModelError, ["'os.system'", "Identity, Tanh"]),
        ({"activation_function": ["torch.nn.Tanh"]}, UnsupportedModelError, ["is ['torch.nn.Tanh']"]),
        ({"module_input_name": "token_embeddings"}, UnsupportedModelError, ["module_input_name is 'token_embeddings'"]),
        ({"in_features": "32"}, UnsupportedModelError, ["in_features is '32'"]),
        ({"out_features": None}, UnsupportedModelError, ["out_features is missing"]),
        ({"in_features": 16}, ModelFormatError, ["in_features is 16", "32"]),
        ({"out_features": 9}, ModelFormatError, ["config.json", "size mismatch"]),
        ({"use_residual": True}, ModelFormatError, ["residual.weight"]),
    ],
)
def test_other_modules_are_refused(
    changed: dict[str, Any], kind: type[EncoderError], named: list[str], with_head: Path
) -> None:
    change_json(with_head / "2_Dense" / "config.json", **changed)
    with fails_with(kind, "2_Dense", *named):
        Encoder.load(with_head)


def test_missing_pickled_damaged_and_nan_weights_are_refused(with_head: Path, tmp_path: Path) -> None:
    Encoder.load(with_head).save(tmp_path / "ours")
    exported = tmp_path / "ours" / "2_Dense" / "model.safetensors"
    content = bytearray(exported.read_bytes())
    content[-3] ^= 1
    exported.write_bytes(content)
    with fails_with(ModelFormatError, "2_Dense/model.safetensors", "distcse/checksums.json"):
        Encoder.load(tmp_path / "ours")
    file = with_head / "2_Dense" / "model.safetensors"
    save_file({**load_file(file), "linear.bias": torch.full((8,), float("nan"))}, file)
    with fails_with(NotFiniteError, str(with_head), "linear.bias"):
        Encoder.load(with_head)
    file.unlink()
    with fails_with(ModelFormatError, "2_Dense", "model.safetensors"):
        Encoder.load(with_head)
    (file.parent / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    with fails_with(PickledWeightsError, "2_Dense", "no safetensors"):
        Encoder.load(with_head)


def test_a_discriminator_needs_vectors_of_the_hidden_size(narrow: Path) -> None:
    encoder = Encoder.load(narrow)
    with fails_with(UnsupportedModelError, "objective.detection", "8 and 32"):
        build_detector(DetectionSection(generator="unread"), encoder, encoder)


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


def test_of_two_labels_the_second_ones_probability_is_the_score(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_cross_encoder(tmp_path / "two", tiny(), labels=2)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(
        *map(list, zip(*PAIRS, strict=True)), padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model(**tokens).logits.softmax(dim=1)[:, 1]
    np.testing.assert_allclose(CrossEncoder.load(folder).score(PAIRS), expected, atol=1e-5)
    for names in ({"0": "not_entailment", "1": "entailment"}, {"0": "entailment", "1": "not_entailment"}):
        change_json(folder / "config.json", id2label=names)
        with fails_with(UnsupportedModelError, str(folder), names["1"], "relevant"):
            CrossEncoder.load(folder)


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
