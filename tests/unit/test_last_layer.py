"""A one-token last layer and packing have the vectors, loss and gradient of the plain forward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from distcse.losses import gather_views
from distcse.models import CrossEncoder, Encoder, pool
from distcse.models.fast_layers import can_pack, can_stop_at_one, worth_packing
from distcse.models.student import layers_of
from tests.counting import NumbersRead
from tests.models import make_cross_encoder

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


def test_a_backbone_without_a_list_of_layers_computes_the_full_last_layer(tmp_path: Path) -> None:
    """ALBERT, which repeats one layer."""
    encoder = Encoder(backbone_of("albert", embedding_size=8), MaskTokenizer(), "cls", 11).eval()
    assert not can_stop_at_one(encoder.backbone)
    ids = torch.arange(4, 15).expand(2, 11)
    with torch.no_grad():
        hidden = encoder.backbone(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        torch.testing.assert_close(encoder(ids, torch.ones_like(ids)), hidden[:, 0])


@pytest.mark.parametrize(("family", "attention"), BACKBONES)
def test_loss_and_gradient_equal_those_of_a_full_layer(family: str, attention: str) -> None:
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}
    if family != "distilbert":
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = Encoder(backbone_of(family, attention, **no_dropout), MaskTokenizer(), "cls", 11).train()
    assert can_stop_at_one(encoder.backbone)
    rows: list[tuple[int, ...]] = []
    encoder.backbone.register_forward_hook(lambda _, inputs, output: rows.append(tuple(output.last_hidden_state.shape)))
    assert_equal(encoder, *batch())
    assert rows[0] == (6, 1, 32) and rows[1] == (6, 11, 32)


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


@pytest.mark.parametrize(("family", "attention"), BACKBONES)
def test_a_prepared_mask_hides_the_same_tokens_as_transformers_mask(family: str, attention: str) -> None:
    encoder = Encoder(backbone_of(family, attention), MaskTokenizer(), "mean", 11).eval()
    ids, mask = batch()
    with NumbersRead() as read, torch.no_grad():
        output = encoder(ids, mask)
    torch.testing.assert_close(output, plain_vectors(encoder, ids, mask), atol=1e-6, rtol=1e-5)
    assert not read.names


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
