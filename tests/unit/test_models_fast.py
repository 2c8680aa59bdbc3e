"""Shortcuts of frozen and of trained models change no vector, loss or gradient: kernels, last layer, packing, dropout."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from distcse.api import run
from distcse.events import Reporter
from distcse.losses import gather_views
from distcse.models import CrossEncoder, Encoder, pool
from distcse.models.cpu_kernels import Dropout, dropout, fast_dropout, is_faster, use_mkldnn_linear
from distcse.models.fast_layers import can_pack, can_stop_at_one, worth_packing
from distcse.models.folder import model_class
from distcse.models.loading import attention_of
from distcse.models.student import layers_of
from distcse.recipe import StudentSection, TeacherSection
from distcse.teachers.kinds import kind_of
from tests.backends import run_mutual
from tests.counting import NumbersRead
from tests.jobs import make_recipe
from tests.models import make_cross_encoder, make_family, make_masked_lm
from tests.pairs import make_mutual_recipe

needs_kernels = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
IS_FASTER = "distcse.models.cpu_kernels.is_faster"
SHORTCUTS = {
    "packing": "distcse.models.fast_layers.packed",
    "choice of packing": "distcse.runs.distillation.distillation_task.worth_packing",
    "last layer": "distcse.models.fast_layers.last_layer_at",
    "dropout": "distcse.models.cpu_kernels.dropout",
    "oneDNN layout": "distcse.models.cpu_kernels.onednn_reorder",
}
"""The function that each shortcut calls."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of each shortcut. oneDNN counts as fast, on every CPU."""
    monkeypatch.setattr(IS_FASTER, lambda precision: True)
    found: Counter[str] = Counter()
    for name, path in SHORTCUTS.items():
        module, _, function = path.rpartition(".")
        original = getattr(import_module(module), function)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            found[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(path, counted)
    return found


def test_runs_use_every_shortcut(
    tmp_path: Path, tiny: Callable[..., Path], tiny_cross: Path, sentences: list[str], calls: Counter[str]
) -> None:
    varied = [sentence * (1 + number % 2) for number, sentence in enumerate(sentences[:64])]
    teachers = [tiny("minilm"), tiny_cross, tiny("roberta")]
    recipe = make_recipe(
        tmp_path,
        tiny("bert"),
        teachers,
        varied,
        "student.pooling=cls",
        "training.max_steps=2",
        "training.batch_size=8",
        "evaluation.num_heldout=16",
        "teachers.encoders.1.pooling=null",
        "teachers.encoders.2.similarity=rank",
        "teachers.encoders.2.num_references=20",
        f"objective.detection.generator={make_masked_lm(tmp_path / 'generator', tiny('bert'))}",
    )
    outcome = run(recipe)
    assert (outcome.directory / "evaluation.json").is_file()
    assert set(calls) == set(SHORTCUTS)
    calls.clear()
    short = ("mutual.cycles=1", "bi.epochs=1")
    run_mutual(make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *short), Reporter())
    assert set(calls) == set(SHORTCUTS) - {"choice of packing"}


def has_linear(model: nn.Module) -> bool:
    return any(type(part) is nn.Linear for part in model.modules())


@needs_kernels
@pytest.mark.parametrize("kind", ["bert", "distilbert", "mpnet", "a cross-encoder"])
def test_a_frozen_models_layout_changes_no_vector_and_no_score(
    kind: str, tiny: Callable[..., Path], tiny_cross: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IS_FASTER, lambda precision: True)
    is_cross = kind == "a cross-encoder"
    plain = CrossEncoder.load(tiny_cross) if is_cross else Encoder.load(tiny(kind), pooling="mean").eval()
    with torch.no_grad():
        for weight in plain.parameters():
            weight.add_(0.02)  # a new model's biases are 0
    converted, pairs = copy.deepcopy(plain), list(zip(sentences[:20], sentences[20:40], strict=True))
    use_mkldnn_linear(converted)
    assert has_linear(plain) and not has_linear(converted)
    found, expected = (
        each.score(pairs) if isinstance(each, CrossEncoder) else each.encode(sentences[:50])
        for each in (converted, plain)
    )
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_slow_and_unsupported_kernels_are_not_used(
    tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Intel CPUs, oneDNN may be slower than MKL in fp32; without AVX-512, its bf16 operator raises."""
    monkeypatch.setattr("distcse.models.cpu_kernels.fp32_speedup", lambda: 0.8)
    monkeypatch.setattr("distcse.models.cpu_kernels.onednn_supports", lambda precision: False)
    plain = Encoder.load(tiny(), pooling="mean").eval()
    use_mkldnn_linear(plain, "fp16")
    assert has_linear(plain)
    for precision in ("fp32", "bf16"):
        converted = copy.deepcopy(plain)
        use_mkldnn_linear(converted, precision)
        assert has_linear(converted)
        np.testing.assert_array_equal(
            converted.encode(sentences[:9], precision=precision), plain.encode(sentences[:9], precision=precision)
        )


@needs_kernels
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 1e-2)])
def test_teachers_are_converted_in_their_precision(
    precision: Literal["fp32", "bf16"], tolerance: float, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    converted = kind_of(TeacherSection(backbone=str(tiny()), pooling="mean", precision=precision)).open_embedder()
    assert isinstance(converted, Encoder) and has_linear(converted) != is_faster(precision)
    plain, found = Encoder.load(tiny(), pooling="mean"), converted.encode(sentences[:50], precision=precision)
    np.testing.assert_allclose(found, plain.encode(sentences[:50], precision=precision), atol=tolerance)
    assert (np.abs(found - plain.encode(sentences[:50])).max() > 1e-4) == (precision == "bf16")


def test_frozen_matrices_are_fp16_on_a_gpu(
    tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's `meta` device, whose tensors have no values, replaces the GPU; the values are computed on the CPU."""
    monkeypatch.setattr("distcse.teachers.kinds.base.default_device", lambda: "meta")
    section = TeacherSection(backbone=str(tiny()), pooling="mean", precision="fp16")
    frozen = kind_of(section).open_embedder()
    assert isinstance(frozen, Encoder)
    matrices = {id(weight) for part in frozen.modules() if isinstance(part, nn.Linear) for weight in part.parameters()}
    for weight in frozen.parameters():
        assert weight.dtype == (torch.float16 if id(weight) in matrices else torch.float32)
    half, plain = Encoder.from_section(section, torch.float16).eval(), Encoder.from_section(section).eval()
    found, expected = (each.encode(sentences[:50], precision="fp16", normalize=True) for each in (half, plain))
    assert found.dtype == np.float32 and np.abs(found @ found.T - expected @ expected.T).max() < 2e-3


BACKBONES = [
    *(("bert", "eager"), ("bert", "sdpa"), ("roberta", "sdpa"), ("xlm-roberta", "eager"), ("camembert", "sdpa")),
    *(("electra", "eager"), ("distilbert", "eager"), ("distilbert", "sdpa")),
]
"""Families and attentions: all families of the shortcuts, and both attentions of each kind of layer that has them."""


SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
DISTIL = {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "vocab_size": 60, "max_position_embeddings": 40}


class MaskTokenizer:
    """The attributes of a tokenizer that a forward pass uses."""

    mask_token_id = 5


def backbone_of(family: str, attention: str = "eager", **others: Any) -> nn.Module:
    sizes = DISTIL if family == "distilbert" else SMALL
    config = AutoConfig.for_model(family, **sizes, **others, attn_implementation=attention)
    torch.manual_seed(0)
    model: nn.Module = AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)  # far from 0, so that attention differs between tokens
    return model


def batch(left: bool = False) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(6, 60, (6, 11))
    mask = (torch.arange(11) < torch.tensor([11, 3, 7, 5, 11, 2])[:, None]).long()
    ids[:, 1] = MaskTokenizer.mask_token_id
    return (ids.flip(1), mask.flip(1)) if left else (ids, mask)


def plain_vectors(encoder: Encoder, ids: Tensor, mask: Tensor) -> Tensor:
    """Compute every token in every layer, then pool."""
    hidden = encoder.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
    return pool(encoder.pooling, hidden, mask, ids == MaskTokenizer.mask_token_id)


def loss_and_gradient(encoder: Encoder, vectors: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a contrastive loss of vectors, and its gradient."""
    loss = -(gather_views(vectors, vectors.flip(0)).similarities / 0.05).log_softmax(dim=1).diagonal().mean()
    parameters = [p for n, p in encoder.backbone.named_parameters() if "pooler" not in n]
    return loss.detach(), [g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]


def assert_equal(encoder: Encoder, ids: Tensor, mask: Tensor, index: Tensor | None = None) -> None:
    with torch.no_grad():
        torch.testing.assert_close(encoder(ids, mask, index), plain_vectors(encoder, ids, mask), atol=1e-6, rtol=1e-5)
    fast, slow = encoder(ids, mask, index), plain_vectors(encoder, ids, mask)
    (loss, gradient), (plain, expected) = loss_and_gradient(encoder, fast), loss_and_gradient(encoder, slow)
    torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-6)
    assert len(gradient) == len(expected) >= 20
    difference = torch.cat([(a - b).flatten() for a, b in zip(gradient, expected, strict=True)]).norm()
    assert difference <= 5e-6 * torch.cat([b.flatten() for b in expected]).norm()


@pytest.mark.parametrize(("family", "attention"), BACKBONES)
def test_a_last_layer_for_one_token_and_a_prepared_mask_equal_those_of_transformers(
    family: str, attention: str
) -> None:
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}
    if family != "distilbert":
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = Encoder(backbone_of(family, attention, **no_dropout), MaskTokenizer(), "cls", 11).train()
    assert can_stop_at_one(encoder.backbone)
    rows: list[tuple[int, ...]] = []
    encoder.backbone.register_forward_hook(lambda _, inputs, output: rows.append(tuple(output.last_hidden_state.shape)))
    assert_equal(encoder, *batch())
    assert rows[0] == (6, 1, 32) and rows[1] == (6, 11, 32)
    every, (ids, mask) = Encoder(encoder.backbone, MaskTokenizer(), "mean", 11).eval(), batch()
    with NumbersRead() as read, torch.no_grad():
        output = every(ids, mask)
    torch.testing.assert_close(output, plain_vectors(every, ids, mask), atol=1e-6, rtol=1e-5)
    assert not read.names


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pooling", ["cls", "last_token", "mask"])
def test_the_token_may_have_any_position(pooling: Any, left: bool) -> None:
    encoder = Encoder(backbone_of("bert", "sdpa"), MaskTokenizer(), pooling, 11).eval()
    assert_equal(encoder, *batch(left))


def test_other_poolings_and_layers_use_the_plain_forward_pass() -> None:
    passed: list[int] = []
    for encoder in (
        Encoder(backbone_of("bert"), MaskTokenizer(), "mean", 11),
        Encoder(backbone_of("deberta-v2", relative_attention=True), MaskTokenizer(), "cls", 11),
        Encoder(backbone_of("albert", embedding_size=8), MaskTokenizer(), "cls", 11),  # repeats one layer
    ):
        encoder.backbone.register_forward_hook(
            lambda _, inputs, output: passed.append(output.last_hidden_state.shape[1])
        )
        assert_equal(encoder.eval(), *batch())
    assert not can_stop_at_one(backbone_of("bert", is_decoder=True))
    custom = backbone_of("bert")
    custom.encoder.layer[-1].__class__ = type("BertLayer", (type(custom.encoder.layer[-1]),), {})  # of custom code
    assert not can_stop_at_one(custom)
    assert set(passed) == {11}


def test_only_the_last_layers_dropout_differs_and_the_layer_is_restored() -> None:
    encoder = Encoder(backbone_of("bert"), MaskTokenizer(), "cls", 11).train()
    seen: list[Tensor] = []
    encoder.backbone.encoder.layer[1].register_forward_hook(lambda _, inputs, output: seen.append(output))
    ids, mask = batch()
    torch.manual_seed(3)
    one = encoder(ids, mask)
    torch.manual_seed(3)
    plain_vectors(encoder, ids, mask)
    assert torch.equal(seen[0], seen[1])
    torch.manual_seed(3)
    assert torch.equal(encoder(ids, mask), one)
    assert all("forward" not in module.__dict__ for module in encoder.modules())


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "modernbert"])
def test_a_cross_encoder_has_the_scores_of_the_plain_forward_pass(
    kind: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    encoder = CrossEncoder.load(make_cross_encoder(tmp_path, tiny(kind))).eval()
    shapes: list[int] = []
    encoder.model.base_model.register_forward_hook(
        lambda _, inputs, output: shapes.append(output.last_hidden_state.shape[1])
    )
    ids, mask = batch()
    ids = ids.clamp(max=50)
    output, plain = encoder(ids, mask), encoder.model(input_ids=ids, attention_mask=mask).logits[:, 0]
    torch.testing.assert_close(output, plain, atol=1e-6, rtol=1e-5)
    parameters = [p for p in encoder.parameters() if p.requires_grad]
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), parameters) for x in (output, plain)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    assert shapes == [11 if kind == "modernbert" else 1, 11]  # its layers use the plain forward pass


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        ("bert", "cls"),
        ("bert", "mean"),
        ("roberta", "last_token"),
        ("distilbert", "mean"),
        ("distilbert", "last_token"),
    ],
)
def test_packed_batches_have_the_loss_and_gradient_of_padded_ones(family: str, pooling: Any, left: bool) -> None:
    encoder = Encoder(backbone_of(family), MaskTokenizer(), pooling, 11).eval()
    ids, mask = batch(left)
    if left and family != "distilbert":
        ids = ids.masked_fill(mask == 0, 1)  # RoBERTa's positions begin at the first token that is not padding
    processed: list[int] = []
    linears = [m for m in layers_of(encoder.backbone)[1].modules() if isinstance(m, nn.Linear) and m.in_features == 64]
    linears[0].register_forward_hook(lambda _, inputs, output: processed.append(inputs[0].shape[:2].numel()))
    assert_equal(encoder, ids, mask, mask.flatten().nonzero()[:, 0])
    assert processed[0] == mask.sum() and processed[1] == mask.numel()
    assert all("forward" not in module.__dict__ for module in encoder.modules())


def test_full_batches_fused_attention_and_unknown_layers_are_not_packed() -> None:
    ids, mask = batch()
    index = mask.flatten().nonzero()[:, 0]
    assert can_pack(backbone_of("bert"), mask)
    assert not can_pack(backbone_of("bert", "sdpa"), mask)
    assert not can_pack(backbone_of("modernbert"), mask)
    assert worth_packing(np.array([[11, 3, 7], [5, 11, 2]]))
    assert not worth_packing(np.array([[11, 11, 10], [2, 2, 2]]))
    assert_equal(Encoder(backbone_of("modernbert"), MaskTokenizer(), "cls", 11).eval(), ids, mask, index)


@pytest.mark.parametrize(("p", "dtype"), [(0.1, torch.float32), (0.5, torch.bfloat16), (0.9, torch.float32)])
def test_a_fraction_p_is_dropped_independently_and_the_mean_is_kept(p: float, dtype: torch.dtype) -> None:
    """Independent are also neighbors, rows and columns, and values whose random numbers share a draw."""
    torch.manual_seed(0)
    values = torch.ones(1001, 999, dtype=dtype)
    found = dropout(values, p, True)
    assert found.dtype == dtype and found.shape == values.shape
    (scale,) = found[found != 0].unique().tolist()
    assert abs(1 - p - (found != 0).float().mean().item()) < 2e-3  # four standard deviations
    assert scale == pytest.approx(1 / (1 - p), rel=1e-4 if dtype == torch.float32 else 4e-3)
    flat = (found == 0).float().flatten() - p
    for lag in (1, 2, 3, 4, 5, 999):
        assert abs((flat[lag:] * flat[:-lag]).mean().item()) < 5 * p * (1 - p) / 999, lag  # five standard deviations


def test_dropout_follows_the_seed_masks_the_gradient_and_is_for_training() -> None:
    values = torch.randn(7, 5, requires_grad=True)
    torch.manual_seed(3)
    first = dropout(values, 0.3, True)
    torch.manual_seed(3)
    assert torch.equal(first, dropout(values, 0.3, True))
    assert not torch.equal(first, dropout(values, 0.3, True))
    first.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad * values.detach(), first.detach())
    assert torch.equal(dropout(values, 0.5, False), values) and torch.equal(dropout(values, 0.0, True), values)
    assert torch.isfinite(dropout(values, 1 - 1e-9, True)).all() and dropout(values[:0], 0.5, True).shape == (0, 5)


def test_only_the_dropout_layers_of_a_model_are_replaced() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25), nn.Sequential(nn.AlphaDropout(0.5)))
    names = list(model.state_dict())
    fast_dropout(model)
    assert [type(module) for module in model] == [nn.Linear, Dropout, nn.Sequential]
    assert type(model[2][0]) is nn.AlphaDropout
    assert list(model.state_dict()) == names and model[1].p == 0.25


@pytest.mark.parametrize("family", ["albert", "electra", "mt5", "bart"])
def test_dropout_counts_only_where_two_passes_differ(family: str, sentences: list[str], tmp_path: Path) -> None:
    """Each probability of a family's config by itself: heads have some, too, and a backbone may skip layers."""
    source = make_family(tmp_path / "source", family, sentences)
    config = Encoder.load(source, pooling="mean", max_length=16).backbone.config
    names = [name for name, value in vars(config).items() if re.search("drop", name) and isinstance(value, float | int)]
    assert len(names) > 1
    for name in names:
        if isinstance(getattr(config, name), bool):
            continue
        for other in names:
            setattr(config, other, 0.5 if other == name else 0.0)
        torch.manual_seed(0)
        backbone = model_class(config).from_config(config, attn_implementation="eager").train()
        encoder = Encoder(backbone, None, "mean", 16)
        inputs = torch.arange(7, 15).repeat(4, 1), torch.ones(4, 8, dtype=torch.long)
        vectors = torch.stack([encoder(*inputs) for _ in range(8)])
        assert encoder.has_dropout == bool((vectors - vectors[0]).abs().max() > 0), name


@pytest.mark.parametrize(
    ("max_length", "trains", "expected"),
    [(128, True, "eager"), (129, True, None), (127, False, "eager"), (128, False, None), (None, True, None)],
)
def test_attention_on_a_cpu_is_eager_where_that_is_faster(
    max_length: int | None, trains: bool, expected: str | None
) -> None:
    assert attention_of(max_length, trains) == expected


def test_a_student_of_128_tokens_can_be_packed(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "model", "xlm-roberta", ["red fish"], max_position_embeddings=140)
    student, teacher = (
        Encoder.from_section(kind(backbone=str(folder), pooling="mean", max_length=128))
        for kind in (StudentSection, TeacherSection)
    )
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert can_pack(student.backbone, mask) and not can_pack(teacher.backbone, mask)
