"""The loops of the public codes, written anew from their description: what distcse's steps are timed against.

Live float32 teachers on both views, every batch padded to its longest row, cosines by broadcasting, AdamW as PyTorch gives it,
attention as transformers gives it. The losses are the papers', exact, as distcse's are: where a public code computes something
else, its speed is compared and not its error. Nothing here is imported by distcse, and no line is a copy.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Rows = Sequence[Any]
"""Token ids of each text."""


def both_views(rows: Rows, pad: int = 0) -> tuple[Tensor, Tensor]:
    """(2N, L) ids and mask: each row twice, side by side, padded to the longest of the batch."""
    longest = max(len(row) for row in rows)
    ids = torch.full((2 * len(rows), longest), pad, dtype=torch.long)
    mask = torch.zeros((2 * len(rows), longest), dtype=torch.long)
    for number, row in enumerate(rows):
        for view in (2 * number, 2 * number + 1):
            ids[view, : len(row)] = torch.as_tensor(np.asarray(row, dtype=np.int64))
            mask[view, : len(row)] = 1
    return ids, mask


def broadcast_cosine(left: Tensor, right: Tensor) -> Tensor:
    """(N, H) and (M, H) -> (N, M) cosines, by way of N · M · H numbers."""
    return nn.CosineSimilarity(dim=-1)(left.unsqueeze(1), right.unsqueeze(0))


def pooled(kind: str, hidden: Tensor, mask: Tensor) -> Tensor:
    """[CLS], or the mean over tokens."""
    if kind == "cls":
        return hidden[:, 0]
    return (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(-1).unsqueeze(-1)


@dataclass
class FrozenTeacher:
    """A teacher that is run for every batch."""

    model: nn.Module
    pooling: str
    weight: float


def live_lists(teachers: Sequence[FrozenTeacher], ids: Tensor, mask: Tensor) -> Tensor:
    """(N, N) weighted mean cosines of the two (equal) views, in float32."""
    total = sum(teacher.weight for teacher in teachers)
    found = []
    with torch.no_grad():
        for teacher in teachers:
            hidden = teacher.model(input_ids=ids, attention_mask=mask).last_hidden_state
            views = pooled(teacher.pooling, hidden, mask).view(len(ids) // 2, 2, -1)
            found.append(teacher.weight / total * broadcast_cosine(views[:, 0], views[:, 1]))
    return torch.stack(found).sum(0)


def contrastive(z1: Tensor, z2: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """(N, N) cosines and SimCSE's loss."""
    cosines = broadcast_cosine(z1, z2)
    return cosines, F.cross_entropy(cosines / tau, torch.arange(len(z1), device=z1.device))


def rankcse_loss(z1: Tensor, z2: Tensor, lists: Tensor, tau1: float, tau2: float, tau3: float) -> Tensor:
    """InfoNCE + Jensen-Shannon consistency + ListNet without the positive (RankCSE Eq. 1, 2, 4), each a mean over the batch."""
    cosines, nce = contrastive(z1, z2, tau1)
    p, q = F.softmax(cosines / tau1, dim=1), F.softmax(broadcast_cosine(z2, z1) / tau1, dim=1)
    middle = ((p + q) / 2).log()
    consistency = sum(F.kl_div(middle, side, reduction="batchmean") for side in (p, q)) / 2
    positives = torch.eye(len(z1), dtype=torch.bool, device=z1.device)
    target = F.softmax((lists / tau3).masked_fill(positives, float("-inf")), dim=1)
    student = F.log_softmax((cosines / tau2).masked_fill(positives, float("-inf")), dim=1)
    list_net = -(target * student).masked_fill(positives, 0.0).sum() / len(z1)
    return nce + consistency + list_net


def list_mle(cosines: Tensor, lists: Tensor, tau: float) -> Tensor:
    """Exact ListMLE, place by place in a Python loop; sum over a list, mean over the batch."""
    order = lists.argsort(dim=1, descending=True)
    logits = (cosines / tau).gather(1, order)
    terms = [logits[:, place:].logsumexp(1) - logits[:, place] for place in range(logits.shape[1])]
    return torch.stack(terms, dim=1).sum(1).mean()


class PublicLoop(ABC):
    """What the public loops do around their loss: training mode, clipping, AdamW as it comes.

    Args:
        modes: Modules that are put into training mode.
        parameters: What is trained.
        lr: Learning rate.
        weight_decay: AdamW's.
    """

    def __init__(
        self, modes: Sequence[nn.Module], parameters: list[nn.Parameter], lr: float, weight_decay: float = 0.0
    ) -> None:
        self._modes, self.parameters = modes, parameters
        self._optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
        self.step = 0

    def __call__(self) -> Tensor:
        """One step; its loss."""
        for module in self._modes:
            module.train()
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    @abstractmethod
    def loss(self) -> Tensor:
        """The step's loss, without an update."""


class ContrastiveLoop(PublicLoop):
    """A step of the public loops: 2N rows padded, a loss, clipping, AdamW as it comes.

    Args:
        backbone: A Hugging Face encoder, trained in place.
        projection: The head of the student in training.
        batches: (step) -> token ids of its rows.
        loss: (z1, z2, ids, mask) -> the batch's loss.
        lr: Learning rate.
        head: What else is trained.
    """

    def __init__(
        self,
        backbone: nn.Module,
        projection: nn.Module,
        batches: Callable[[int], Rows],
        loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
        lr: float = 3e-5,
        head: nn.Module | None = None,
        pooling: str = "cls",
    ) -> None:
        self.backbone, self.projection = backbone, copy.deepcopy(projection)
        self._batches, self._loss, self._pooling = batches, loss, pooling
        parts = [self.backbone, self.projection, *([head] if head is not None else [])]
        parameters = [p for part in parts for p in part.parameters() if p.requires_grad]
        super().__init__([self.backbone, self.projection], parameters, lr)

    def loss(self) -> Tensor:
        """The step's loss, without an update."""
        ids, mask = both_views(self._batches(self.step))
        hidden = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state
        views = self.projection(pooled(self._pooling, hidden, mask)).view(len(ids) // 2, 2, -1)
        return self._loss(views[:, 0], views[:, 1], ids, mask)


def rankcse(teachers: Sequence[FrozenTeacher], tau1: float, tau2: float, tau3: float) -> Callable[..., Tensor]:
    """The loss of a RankCSE step with live teachers."""
    return lambda z1, z2, ids, mask: rankcse_loss(z1, z2, live_lists(teachers, ids, mask), tau1, tau2, tau3)


def simcse(tau: float) -> Callable[..., Tensor]:
    """The loss of a SimCSE step."""
    return lambda z1, z2, ids, mask: contrastive(z1, z2, tau)[1]


def ranks(similarities: Tensor) -> Tensor:
    """(N, n) similarities -> (N, n) centered unit rank vectors: a sort, then each row written through its order in Python."""
    order = similarities.argsort(dim=1)
    found = torch.zeros_like(similarities)
    places = torch.arange(similarities.shape[1], dtype=similarities.dtype, device=similarities.device)
    for row in range(len(similarities)):
        found[row, order[row]] = places
    centered = found - found.mean(dim=1, keepdim=True)
    return centered / (centered**2).sum(dim=1, keepdim=True).sqrt()


def rank_similarities(similarities: Tensor) -> Tensor:
    """(N, N) rank-space similarities; both sides are ranked, as the public code does."""
    return ranks(similarities) @ ranks(similarities).T


def rankencoder(
    teacher: FrozenTeacher, references: Tensor, tau: float, weight: float, lower: float, upper: float
) -> Callable[..., Tensor]:
    """The loss of a RankEncoder step: the base encoder live on both views, every similarity to n references twice."""

    def loss(z1: Tensor, z2: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        cosines, nce = contrastive(z1, z2, tau)
        with torch.no_grad():
            hidden = teacher.model(input_ids=ids, attention_mask=mask).last_hidden_state
            vectors = F.normalize(pooled(teacher.pooling, hidden, mask), dim=1).view(len(z1), 2, -1)
            first, _ = vectors[:, 0] @ references.T, vectors[:, 1] @ references.T
            targets = rank_similarities(first)
            kept = ((targets >= lower) & (targets <= upper)).float()
        errors = (kept * (cosines - targets) ** 2).sum() / (kept.sum() + 1e-8)
        return nce + weight * errors

    return loss


def pairwise_spearman(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(p, n) and (p, n) similarities -> (p,) Spearman correlations, pair by pair by scipy."""
    from scipy.stats import spearmanr  # which a bare GPU image need not have

    return np.array([spearmanr(one, other).statistic for one, other in zip(first, second, strict=True)])


def padded_batch(rows: Rows, pad: int = 0) -> tuple[Tensor, Tensor]:
    """(B, L) ids and mask, padded to the longest of the batch."""
    ids, mask = both_views(rows, pad)
    return ids[::2], mask[::2]


class PairLoop(PublicLoop):
    """Trans-Encoder's training steps: two forward passes (bi) or one (cross), each padded to its batch's longest.

    Args:
        model: A Hugging Face encoder, or a sequence classifier for `cross`.
        batches: (step) -> (rows of the first side, rows of the second, labels); one side of joined pairs for `cross`.
        cross: Which formulation.
        pooling: Of the bi-encoder.
    """

    def __init__(
        self, model: nn.Module, batches: Callable[[int], tuple[Rows, Rows, Tensor]], cross: bool, pooling: str = "mean"
    ) -> None:
        self.model, self._batches, self._cross, self._pooling = model, batches, cross, pooling
        super().__init__([model], [p for p in model.parameters() if p.requires_grad], lr=2e-5, weight_decay=0.01)

    def loss(self) -> Tensor:
        """The step's loss, without an update."""
        first, second, labels = self._batches(self.step)
        if self._cross:
            ids, mask = padded_batch(first)
            kinds = padded_batch(second)[0]
            logits = self.model(input_ids=ids, attention_mask=mask, token_type_ids=kinds).logits[:, 0]
            return F.binary_cross_entropy_with_logits(logits, labels)
        sides = [self._vectors(side) for side in (first, second)]
        return F.mse_loss(F.cosine_similarity(*sides), labels)

    def _vectors(self, rows: Rows) -> Tensor:
        ids, mask = padded_batch(rows)
        return pooled(self._pooling, self.model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@torch.no_grad()
def score_bi(model: nn.Module, tokenizer: Any, pairs: Sequence[tuple[str, str]], pooling: str = "mean") -> np.ndarray:
    """(n,) cosines: every sentence of every pair encoded, batches of 32 as they come."""
    model.eval()
    found = []
    for begin in range(0, len(pairs), 32):
        part = pairs[begin : begin + 32]
        sides = []
        for side in (0, 1):
            read = tokenizer(
                [pair[side] for pair in part], padding=True, truncation=True, max_length=32, return_tensors="pt"
            ).to(_device(model))
            hidden = model(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).last_hidden_state
            sides.append(pooled(pooling, hidden, read["attention_mask"]))
        found.append(F.cosine_similarity(*sides).cpu())
    return torch.cat(found).numpy()


@torch.no_grad()
def score_cross(model: nn.Module, tokenizer: Any, pairs: Sequence[tuple[str, str]], max_length: int = 64) -> np.ndarray:
    """(n,) probabilities: every pair read, batches of 32 as they come."""
    model.eval()
    found = []
    for begin in range(0, len(pairs), 32):
        first, second = zip(*pairs[begin : begin + 32], strict=True)
        read = tokenizer(
            list(first), list(second), padding=True, truncation=True, max_length=max_length, return_tensors="pt"
        ).to(_device(model))
        found.append(model(**read).logits[:, 0].sigmoid().cpu())
    return torch.cat(found).numpy()


def batches_of(texts: Sequence[str], batch: int = 128) -> list[list[int]]:
    """Places of texts, sorted by their number of words, in batches of `batch`."""
    order = sorted(range(len(texts)), key=lambda place: len(texts[place].split()))
    return [order[begin : begin + batch] for begin in range(0, len(order), batch)]


@torch.no_grad()
def encode(
    model: nn.Module, tokenizer: Any, texts: Sequence[str], pooling: str = "cls", batch: int = 128
) -> np.ndarray:
    """(n, H) vectors as the dev evaluation makes them: by number of words, tokenized anew, in float32."""
    model.eval()
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    for places in batches_of(texts, batch):
        read = tokenizer(
            [texts[place] for place in places], padding=True, truncation=True, max_length=512, return_tensors="pt"
        ).to(_device(model))
        hidden = model(input_ids=read["input_ids"], attention_mask=read["attention_mask"]).last_hidden_state
        for place, vector in zip(places, pooled(pooling, hidden, read["attention_mask"]).float().cpu(), strict=True):
            found[place] = vector
    return torch.stack(found).numpy()


class ReplacedTokens(nn.Module):
    """DiffCSE's discriminator side: a generator in training mode, its choice at every position, a second encoder.

    Args:
        generator: A masked language model, frozen.
        discriminator: An encoder from the student's start.
        head: (H, 2) linear layer.
        mask_tokens: (ids, mask) -> ids with tokens masked.
        cls: Id of [CLS].
    """

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        head: nn.Linear,
        mask_tokens: Callable[[Tensor, Tensor], Tensor],
        cls: int,
    ) -> None:
        super().__init__()
        self.discriminator, self.head = discriminator, copy.deepcopy(head)
        self._generator, self._mask_tokens, self._cls = [generator.requires_grad_(False)], mask_tokens, cls

    def forward(self, ids: Tensor, mask: Tensor, vectors: Tensor) -> Tensor:
        """The mean error over all positions, padding too."""
        with torch.no_grad():
            logits = self._generator[0](input_ids=self._mask_tokens(ids, mask), attention_mask=mask).logits
            filled = logits.argmax(-1)
            filled[:, 0] = self._cls
            labels = (filled != ids).long() * mask
            edited = filled * mask
        embedded = self.discriminator.embeddings(input_ids=edited)  # type: ignore[operator]
        embedded = torch.cat([vectors.unsqueeze(1), embedded[:, 1:]], dim=1)
        hidden = through_layers(self.discriminator, embedded, mask)
        return F.cross_entropy(self.head(hidden).view(-1, 2), labels.view(-1))


def through_layers(model: nn.Module, embedded: Tensor, mask: Tensor) -> Tensor:
    """The layers of a BERT over embeddings that are there already."""
    attends = torch.zeros_like(mask, dtype=embedded.dtype).masked_fill(mask == 0, torch.finfo(embedded.dtype).min)
    hidden = embedded
    for layer in model.encoder.layer:  # type: ignore[union-attr]
        found = layer(hidden, attention_mask=attends[:, None, None, :])
        hidden = found[0] if isinstance(found, tuple) else found
    return hidden
