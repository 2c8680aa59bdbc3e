"""DiffCSE: edits by hand, the conditioned discriminator, and runs that do not depend on workers, streams, chunks and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
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
from distcse.models import Encoder, detection
from distcse.models.detection import (
    EditDetector,
    Edited,
    Vocabulary,
    build_detector,
    most_likely_tokens,
    replace,
    sample_tokens,
)
from distcse.recipe import DetectionSection, Recipe
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.runs.distillation.student_model import build_encoder
from distcse.teachers.table import EmbeddingTable
from distcse.text.collate import Tokens, collate
from distcse.training.dropout_rng import dropout_rng, dropout_seed
from tests.backends import run
from tests.failures import fails_with
from tests.gpusim import simulated
from tests.jobs import make_recipe, make_spec, train
from tests.models import make_encoder, make_masked_lm
from tests.training_step import TrainingStep
from tests.weights import assert_same_learning, weights_of
from tests.workers import run_workers

WORDS = Vocabulary(size=50, cls=2, pad=0, mask=4, special=(0, 1, 2, 3, 4))
IDS = torch.tensor([[2, 10, 11, 12, 13, 3], [2, 20, 21, 3, 0, 0]]).repeat(200, 1)
MASK = (IDS != 0).long()


@pytest.fixture(scope="module")
def generator(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a masked language model."""
    return make_masked_lm(tmp_path_factory.mktemp("generator"), tiny("bert"))


@pytest.fixture(scope="module")
def encoder(tiny: Callable[..., Path]) -> Encoder:
    """Return an encoder that no test changes."""
    return Encoder.load(tiny("bert"), pooling="cls", max_length=24)


@pytest.fixture
def detector_with(tiny: Callable[..., Path], generator: Path, encoder: Encoder) -> Callable[..., EditDetector]:
    """Makes detectors with settings."""

    def make(**settings: Any) -> EditDetector:
        section = DetectionSection(generator=str(generator), **settings)
        return build_detector(section, encoder, Encoder.load(tiny("bert"), pooling="cls", max_length=24))

    return make


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
    found = detector.hidden_states(Edited(ids["input_ids"], ids["attention_mask"], ids["input_ids"]), vectors)
    # By hand: the embeddings, slot 0 replaced, through the encoder's layers.
    embedded = reference.embeddings(input_ids=ids["input_ids"]).clone()
    embedded[:, 0] = vectors
    hidden = reference.encoder(embedded).last_hidden_state
    torch.testing.assert_close(found, hidden, atol=1e-5, rtol=1e-4)
    again = encoder(ids["input_ids"], ids["attention_mask"])
    assert torch.isfinite(again).all()  # the hook is gone


def test_sampling_is_a_function_of_seed_step_and_stream(
    encoder: Encoder, detector_with: Callable[..., EditDetector]
) -> None:
    detector = detector_with(sampling="sample").train()
    ids = encoder.tokenizer(["A man is playing a guitar."] * 4, return_tensors="pt")
    tokens = Tokens(ids["input_ids"], ids["attention_mask"])

    def edited(step: int, stream: int) -> Tensor:
        with dropout_rng(dropout_seed(42, step, stream), tokens.ids.device):
            return detector.edit(tokens).ids

    assert torch.equal(edited(3, 0), edited(3, 0))
    assert not torch.equal(edited(3, 0), edited(4, 0)) and not torch.equal(edited(3, 0), edited(3, 1))


@pytest.mark.parametrize("reduction", ["all", "nonpad"])
def test_without_padding_it_finds_the_same(
    reduction: str, encoder: Encoder, detector_with: Callable[..., EditDetector], sentences: list[str]
) -> None:
    detector = detector_with(reduction=reduction).eval()
    assert not any("generator" in name for name in detector.state_dict())
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
    assert gradient is not None and gradient.norm() > 0
    torch.testing.assert_close(gradient, plain_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "modernbert"])
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


def test_a_generator_that_does_not_fit_is_refused(
    encoder: Encoder, tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
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
    with fails_with(InvalidValueError, "objective.detection.generator is missing"):
        make_recipe(
            tmp_path, tiny("bert"), [], sentences, "objective.detection.masking_ratio=0.2", "objective.rank=null"
        )


@pytest.fixture(scope="module")
def diffcse(
    tiny: Callable[..., Path], generator: Path, sentences: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Recipe]:
    """Makes recipes with edit detection and a teacher."""
    folder = tmp_path_factory.mktemp("diffcse")
    overrides = (
        *("student.pooling=cls", "student.projection=batch_norm_mlp"),
        *("objective.rank=null", "objective.consistency=null"),
        f"objective.detection.generator={generator}",
        "objective.detection.weight=0.05",
    )
    return lambda *more: make_recipe(folder, tiny("bert"), [tiny("roberta")], sentences, *overrides, *more)


def test_diffcse_trains_and_leaves_the_encoder_alone(diffcse: Callable[..., Recipe], tiny: Callable[..., Path]) -> None:
    """Also an ELECTRA, whose embeddings are narrower than its layers."""
    events: list[Any] = []
    overrides = (
        "training.epochs=2",
        "training.lr=3e-3",
        f"student.backbone={tiny('electra')}",
        "evaluation.final_suites=[]",
    )
    result = run(diffcse(*overrides), Reporter(events.append))
    steps = [event for event in events if isinstance(event, StepReport)]
    assert {"detection", "info_nce", "edited_accuracy", "kept_accuracy"} <= steps[0].losses.keys()
    assert steps[-1].losses["detection"] < 0.8 * steps[0].losses["detection"]
    saved = {file.name for file in result.directory.model.rglob("*.safetensors")}
    assert saved == {"model.safetensors"}
    parameters = sum(p.numel() for p in Encoder.load(result.directory.model).parameters())
    assert parameters == sum(p.numel() for p in build_encoder(result.recipe.student).encoder.parameters())


SHORT = (
    *("objective.detection.sampling=sample", "training.dropout_rng_streams=2"),
    *("training.max_steps=6", "training.log_every=2"),
)


@pytest.fixture(scope="module")
def learned(diffcse: Callable[..., Recipe]) -> dict[str, Tensor]:
    """Train on one worker with the plain engine, and return the weights."""
    spec, tables = make_spec(diffcse(*SHORT))
    train(spec, tables)
    return weights_of(spec.run.path)


def assert_learned(spec: TrainSpec, learned: dict[str, Tensor]) -> None:
    assert any(name.startswith("detector.") for name in learned)
    assert not any("generator" in name for name in learned)
    # Batch norm takes the constant out of what reaches it: that bias has no gradient either
    excluded = ("encoder.layer.1.output.LayerNorm.bias", "running_mean")
    assert_same_learning(learned, weights_of(spec.run.path), excluded=excluded)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_learns_what_the_plain_engine_does(
    diffcse: Callable[..., Recipe], learned: dict[str, Tensor], stage: int
) -> None:
    spec, tables = make_spec(diffcse(*SHORT, "training.engine=deepspeed", f"training.zero_stage={stage}"))
    if stage:
        assert train(spec, tables, stop_after=2).interrupted
    train(spec, tables)
    assert_learned(spec, learned)


FirstStep = tuple[float, dict[str, Tensor], set[int]]


@contextmanager
def fixed_edits() -> Iterator[None]:
    """Choose edits by token id: random choices differ between numbers of streams."""

    def choose_by_id(ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary) -> Tensor:
        return (ids % 3 == 0) & mask.bool() & ~torch.isin(ids, torch.tensor(words.special, device=ids.device))

    def mask_all(ids: Tensor, chosen: Tensor, words: Vocabulary) -> Tensor:
        return torch.where(chosen, words.mask, ids)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detection, "choose_positions", choose_by_id)
        patch.setattr(detection, "mask_chosen", mask_all)
        yield


def first_step(spec: TrainSpec, rank: int = 0, workers: int = 1) -> FirstStep:
    """Loss and gradient of the global batch, and the lengths that this worker's streams are padded to."""
    with fixed_edits():
        step = TrainingStep(spec, [], rank, workers)
        step.task.model.train()
        share, _ = step.loss()
        step.engine.backward(share)
        named = step.task.model.named_parameters()
        gradient = {name: p.grad.cpu() for name, p in named if p.grad is not None}
        loss = share.detach().clone()
        if workers > 1:
            for part in (loss, *gradient.values()):
                dist.all_reduce(part)
        streams = step.task.prepare_batch(0, step.engine.device).model_inputs.streams
        return loss.item(), gradient, {tokens.ids.shape[1] for tokens, _ in streams}


def assert_equal(found: FirstStep, expected: FirstStep) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys() and any(name.startswith("detector.") for name in found[1])
    differences = torch.cat([(found[1][name] - expected[1][name]).flatten() for name in found[1]])
    assert differences.norm() <= 1e-5 * torch.cat([each.flatten() for each in expected[1].values()]).norm()


@pytest.fixture(scope="module")
def spec_with(
    tiny: Callable[..., Path], generator: Path, sentences: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., TrainSpec]:
    """Makes runs without noise, whose batches have one long sentence among short ones."""
    folder = tmp_path_factory.mktemp("padding")
    lines = [" ".join(line.split()[:2]) if number % 16 else f"{line} {line}" for number, line in enumerate(sentences)]
    lines = list(dict.fromkeys(f"{line} {number}" for number, line in enumerate(lines[:64])))
    overrides = (
        "student.pooling=cls",
        "student.projection=none",
        "student.dropout=0",
        "objective.rank=null",
        "objective.consistency=null",
        f"objective.detection={{generator: {generator}, generator_dropout: false, weight: 1.0}}",
        "evaluation={dev: none, num_heldout: 0, final_suites: []}",
    )
    return lambda *more: make_spec(make_recipe(folder, tiny("bert"), [], lines, *overrides, *more))[0]


@pytest.fixture(scope="module")
def in_one_pass(spec_with: Callable[..., TrainSpec]) -> FirstStep:
    return first_step(spec_with())


@pytest.mark.parametrize("part", ["dropout_rng_streams=4", "grad_cache_chunk=4"])
def test_streams_and_chunks_have_the_loss_of_one_pass(
    part: str, spec_with: Callable[..., TrainSpec], in_one_pass: FirstStep
) -> None:
    """The mean over all positions counts the padding of the global batch."""
    found = first_step(spec_with(f"training.{part}"))
    assert len(found[2]) > 1 and max(found[2]) == max(in_one_pass[2])  # streams of several lengths
    assert_equal(found, in_one_pass)


@pytest.mark.parametrize("part", [(), ("training.dropout_rng_streams=4",)])
def test_a_gpu_has_the_loss_of_a_cpu(
    part: tuple[str, ...], spec_with: Callable[..., TrainSpec], in_one_pass: FirstStep
) -> None:
    """Its host does not know the longest sentence: rows are padded further, and what is beyond is not counted."""
    spec = spec_with(*part)
    with simulated():
        found = first_step(spec)
    assert found[2] == {max(in_one_pass[2])}
    assert_equal(found, in_one_pass)


def _in_worker(trained: TrainSpec, tables: list[EmbeddingTable], padded: TrainSpec) -> FirstStep:
    train(trained, tables)
    return first_step(padded, dist.get_rank(), 2)


@pytest.mark.slow
def test_two_workers_learn_what_one_does(
    diffcse: Callable[..., Recipe],
    learned: dict[str, Tensor],
    spec_with: Callable[..., TrainSpec],
    in_one_pass: FirstStep,
) -> None:
    spec, tables = make_spec(diffcse(*SHORT))
    one, other = run_workers(_in_worker, 2, spec, tables, spec_with())
    assert_learned(spec, learned)
    assert one[2] != other[2]
    assert_equal(one, in_one_pass)
    assert_equal(other, in_one_pass)
