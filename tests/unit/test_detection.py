"""DiffCSE: edits by hand, the conditioned discriminator, and complete runs on one worker and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM

from distcse.errors import (
    InvalidValueError,
    ModelFormatError,
    ModelNotFoundError,
    TokenizerError,
    UnsupportedModelError,
)
from distcse.events import Reporter, StepReport
from distcse.models import Encoder
from distcse.models.detection import (
    EditDetector,
    Vocabulary,
    build_detector,
    most_likely_tokens,
    replace,
    sample_tokens,
)
from distcse.recipe import DetectionSection
from distcse.runs.distillation.model import build_encoder
from distcse.text.collate import Tokens, collate
from distcse.training.dropout_rng import dropout_rng, dropout_seed
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe, make_spec, train
from tests.models import make_encoder, make_masked_lm
from tests.weights import assert_same_learning, weights_of
from tests.workers import run_workers

WORDS = Vocabulary(size=50, cls=2, pad=0, mask=4, special=(0, 1, 2, 3, 4))
IDS = torch.tensor([[2, 10, 11, 12, 13, 3], [2, 20, 21, 3, 0, 0]]).repeat(200, 1)
MASK = (IDS != 0).long()


def sevens(ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
    """A generator that knows one word."""
    return ids.masked_fill(wanted, 7)


def test_replacement_masks_words_alone_and_labels_what_differs() -> None:
    torch.manual_seed(0)
    seen: list[Tensor] = []

    def fill(ids: Tensor, mask: Tensor, wanted: Tensor) -> Tensor:
        seen.append(ids)
        return sevens(ids, mask, wanted)

    edited = replace(IDS, MASK, 0.4, WORDS, fill, masked_only=True)
    (masked,) = seen
    special = torch.isin(IDS, torch.tensor(WORDS.special))
    assert torch.equal(masked[special], IDS[special])
    share_masked = (masked[~special] == WORDS.mask).float().mean().item()
    assert share_masked == pytest.approx(0.4 * 0.8, abs=0.04)  # 80 % masks, 10 % random, 10 % as they were
    chosen = edited.ids[~special] == 7
    assert chosen.float().mean().item() == pytest.approx(0.4, abs=0.04)
    assert torch.equal(edited.labels, ((edited.ids != IDS) & MASK.bool()).long())
    everywhere = replace(IDS, MASK, 0.4, WORDS, sevens, masked_only=False)
    assert everywhere.ids[0].tolist() == [2, 7, 7, 7, 7, 7] and everywhere.labels[1].tolist() == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_the_sentences_vector_stands_in_slot_0(tiny: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    encoder = Encoder.load(tiny(kind), pooling="cls")
    section = DetectionSection(generator=str(make_masked_lm(tmp_path / "generator", tiny(kind))))
    detector = build_detector(section, encoder, Encoder.load(tiny(kind), pooling="cls")).eval()
    reference: Any = AutoModel.from_pretrained(tiny(kind)).eval()
    ids = encoder.tokenizer(["A man is playing a guitar.", "The cat sees nothing at all."], return_tensors="pt")
    vectors = torch.randn(2, encoder.dimension)
    from distcse.models.detection import Edited

    found = detector.hidden_states(Edited(ids["input_ids"], ids["attention_mask"], ids["input_ids"]), vectors)
    # By hand: the embeddings, slot 0 replaced, through the encoder's layers.
    embedded = reference.embeddings(input_ids=ids["input_ids"]).clone()
    embedded[:, 0] = vectors
    hidden = reference.encoder(embedded).last_hidden_state
    torch.testing.assert_close(found, hidden, atol=1e-5, rtol=1e-4)
    again = encoder(ids["input_ids"], ids["attention_mask"])
    assert torch.isfinite(again).all()  # the hook is gone


def test_the_vector_gets_a_gradient_and_the_generator_none(tiny: Callable[..., Path], tmp_path: Path) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    section = DetectionSection(generator=str(generator))
    encoder = Encoder.load(tiny("bert"), pooling="cls")
    detector = build_detector(section, encoder, Encoder.load(tiny("bert"), pooling="cls")).train()
    ids = encoder.tokenizer(["A man is playing a guitar."] * 4, return_tensors="pt")
    vectors = torch.randn(4, encoder.dimension, requires_grad=True)
    share, accuracies = detector(Tokens(ids["input_ids"], ids["attention_mask"]), vectors).shares()
    share.backward()
    assert vectors.grad is not None and vectors.grad.norm() > 0
    assert not any("generator" in name for name in detector.state_dict())
    assert all(0 <= value <= 1 for value in accuracies.values())


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "modernbert"])
def test_the_generators_head_sees_wanted_positions_alone_and_finds_the_same_words(
    kind: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, encoder = make_masked_lm(tmp_path, tiny(kind)), Encoder.load(tiny(kind), pooling="cls")
    size = len(encoder.tokenizer)
    generator = AutoModelForMaskedLM.from_pretrained(folder)
    words = Vocabulary(size, encoder.tokenizer.cls_token_id, 0, encoder.tokenizer.mask_token_id, ())
    detector = EditDetector(encoder.backbone, generator, words, DetectionSection(generator=str(folder))).train()
    monkeypatch.setattr("distcse.models.detection.LOGITS_BYTES", 3 * 4 * size)
    at_a_time: list[int] = []
    generator.register_forward_hook(lambda _, given, found: at_a_time.append(found.logits.shape[1]))
    ids = encoder.tokenizer(["A man is playing a guitar.", "The cat sees nothing."], padding=True, return_tensors="pt")
    tokens = ids["input_ids"], ids["attention_mask"]
    wanted = (torch.rand(tokens[0].shape, generator=torch.Generator().manual_seed(0)) < 0.6) & tokens[1].bool()
    torch.manual_seed(0)
    with torch.no_grad():
        found = detector.fill(*tokens, wanted)
    model = AutoModelForMaskedLM.from_pretrained(folder).train()
    torch.manual_seed(0)
    with torch.no_grad():
        expected = model(input_ids=tokens[0], attention_mask=tokens[1]).logits.argmax(dim=2)
    assert torch.equal(found, torch.where(wanted, expected, tokens[0])) and wanted.sum() > 3
    assert max(at_a_time) == 3 and sum(at_a_time) == wanted.sum()
    assert "forward" not in generator.base_model.__dict__


def test_sampled_tokens_have_the_generators_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    logits = probabilities.log().repeat(40_000, 1)
    torch.manual_seed(0)
    shares = sample_tokens(logits).bincount(minlength=5) / len(logits)
    assert (shares - probabilities).abs().max() < 0.01  # 4 standard deviations
    assert shares[1] == 0  # impossible tokens are never drawn
    assert torch.equal(most_likely_tokens(logits), torch.zeros(len(logits), dtype=torch.long))
    certain = torch.full((100, 30_000), -100.0)
    certain[:, -1] = 100.0
    assert (sample_tokens(certain) == 29_999).all()


def test_sampling_is_a_function_of_seed_step_and_stream(tiny: Callable[..., Path], tmp_path: Path) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    section = DetectionSection(generator=str(generator), sampling="sample")
    encoder = Encoder.load(tiny("bert"), pooling="cls")
    detector = build_detector(section, encoder, Encoder.load(tiny("bert"), pooling="cls")).train()
    ids = encoder.tokenizer(["A man is playing a guitar."] * 4, return_tensors="pt")
    tokens = Tokens(ids["input_ids"], ids["attention_mask"])

    def edited(step: int, stream: int) -> Tensor:
        with dropout_rng(dropout_seed(42, step, stream), tokens.ids.device):
            return detector.edit(tokens).ids

    assert torch.equal(edited(3, 0), edited(3, 0))
    assert not torch.equal(edited(3, 0), edited(4, 0)) and not torch.equal(edited(3, 0), edited(3, 1))


@pytest.mark.parametrize("reduction", ["all", "nonpad"])
def test_without_padding_it_finds_the_same(
    reduction: str, tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    section = DetectionSection(generator=str(generator), reduction=reduction)
    encoder = Encoder.load(tiny("bert"), pooling="cls", max_length=24)
    detector = build_detector(section, encoder, Encoder.load(tiny("bert"), pooling="cls", max_length=24)).eval()
    tokens = collate([np.asarray(row) for row in encoder.token_ids(sentences[:16])], pad_id=0, with_token_index=True)
    assert tokens.token_index is not None and len(tokens.token_index) < tokens.ids.numel()
    results = []
    for given in (tokens, Tokens(tokens.ids, tokens.mask)):
        vectors = torch.ones(16, encoder.dimension, requires_grad=True)
        torch.manual_seed(0)
        found = detector(given, vectors)
        found.loss.backward()
        results.append((found.loss.item(), found.counts, vectors.grad))
    (loss, counts, gradient), (plain, plain_counts, plain_gradient) = results
    assert loss == pytest.approx(plain, rel=1e-5) and torch.equal(counts, plain_counts)
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-4, atol=1e-6)


def test_generators_that_do_not_fit_are_refused(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="cls")
    other = make_encoder(tmp_path / "other", "bert", sentences[:30])
    for generator, kind in (
        (make_masked_lm(tmp_path / "foreign", other), TokenizerError),
        (tiny("bert"), ModelFormatError),
        (tmp_path / "nowhere", ModelNotFoundError),
    ):
        with fails_with(kind, str(generator)):
            build_detector(DetectionSection(generator=str(generator)), encoder, encoder)
    with fails_with(UnsupportedModelError, "BERT"):
        plain = Encoder.load(tiny("bert"), pooling="cls")
        plain.backbone = torch.nn.Linear(2, 2)
        build_detector(DetectionSection(generator="unread"), encoder, plain)


def diffcse(
    folder: Path, tiny: Callable[..., Path], sentences: list[str], *overrides: str, generator: Path | None = None
) -> Any:
    generator = generator or make_masked_lm(folder / "generator", tiny("bert"))
    return make_recipe(
        folder,
        tiny("bert"),
        [tiny("roberta")],
        sentences,
        "student.pooling=cls",
        "student.projection=batch_norm_mlp",
        "objective.rank=null",
        "objective.consistency=null",
        f"objective.detection.generator={generator}",
        "objective.detection.weight=0.05",
        *overrides,
    )


def test_diffcse_trains_and_leaves_the_encoder_alone(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    events: list[Any] = []
    recipe = diffcse(tmp_path, tiny, sentences, "training.epochs=6", "training.lr=3e-3")
    result = run(recipe, Reporter(events.append))
    steps = [event for event in events if isinstance(event, StepReport)]
    assert {"detection", "info_nce", "edited_accuracy", "kept_accuracy"} <= steps[0].losses.keys()
    assert steps[-1].losses["detection"] < 0.8 * steps[0].losses["detection"]
    saved = {file.name for file in result.directory.model.rglob("*.safetensors")}
    assert saved == {"model.safetensors"}
    parameters = sum(p.numel() for p in Encoder.load(result.directory.model).parameters())
    assert parameters == sum(p.numel() for p in build_encoder(result.recipe.student).encoder.parameters())


def _in_worker(spec: Any, tables: Any) -> Any:
    return train(spec, tables)


@pytest.mark.parametrize("sampling", ["argmax", "sample"])
def test_two_workers_learn_what_one_does(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], sampling: str
) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    weights = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        folder.mkdir()
        overrides = (
            f"objective.detection.sampling={sampling}",
            "training.dropout_rng_streams=2",
            "training.max_steps=6",
        )
        spec, tables = make_spec(diffcse(folder, tiny, sentences, *overrides, generator=generator))
        if workers == 1:
            train(spec, tables)
        else:
            run_workers(_in_worker, 2, spec, tables)
        weights.append(weights_of(spec.run.path))
    _assert_same_learning(weights)


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_every_zero_stage_learns_what_the_plain_engine_does(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], stage: int
) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    weights = []
    for engine in (("training.engine=torch",), ("training.engine=deepspeed", f"training.zero_stage={stage}")):
        folder = tmp_path / engine[0].split("=")[1]
        folder.mkdir()
        spec, tables = make_spec(
            diffcse(
                folder, tiny, sentences, "training.max_steps=6", "training.log_every=2", *engine, generator=generator
            )
        )
        if stage:
            assert train(spec, tables, stop_after=2).interrupted
        train(spec, tables)
        weights.append(weights_of(spec.run.path))
    _assert_same_learning(weights)


def _assert_same_learning(weights: list[dict[str, torch.Tensor]]) -> None:
    assert weights[0].keys() == weights[1].keys() and any(name.startswith("detector.") for name in weights[0])
    assert not any("generator" in name for name in weights[0])
    # Batch norm takes the constant out of what reaches it: that bias has no gradient either
    assert_same_learning(*weights, excluded=("encoder.layer.1.output.LayerNorm.bias", "running_mean"))


def test_a_detection_without_generator_is_refused(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    with fails_with(InvalidValueError, "objective.detection.generator is missing"):
        make_recipe(
            tmp_path, tiny("bert"), [], sentences, "objective.detection.masking_ratio=0.2", "objective.rank=null"
        )
