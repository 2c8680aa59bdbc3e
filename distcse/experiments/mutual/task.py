"""One phase of one group as a lesson for the loop: a formulation, its pairs, and the labels that the groups agreed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distcse.data import BatchSampler, collate
from distcse.device import to_device
from distcse.evaluation import PairModel, PairScores, VectorModel
from distcse.evaluation.models import Progress
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.pairs import Pairs
from distcse.losses import bce_soft, mse_cosine
from distcse.models import CrossEncoder, Encoder
from distcse.models.batching import alike
from distcse.recipe import LoopSection
from distcse.trainer.dropout_rng import dropout_rng, dropout_seed
from distcse.trainer.schedule import total_steps
from distcse.trainer.task import StepInputs, describe_rows

T = TypeVar("T")
Row = NDArray[np.int32]
FILLED = 0.5
"""Share of the longest text that the shortest of a rectangle has at least."""
_SLICE = 10_000


class Texts(NamedTuple):
    """Texts of like length."""

    ids: Tensor
    mask: Tensor
    places: Tensor | None
    """Where the tokens are, see `Tokens`; None where the rectangle goes through as it is."""
    kinds: Tensor | None
    """Token types, for cross-encoders that have them."""

    def through(self, encoder: nn.Module) -> Tensor:
        """What an encoder makes of them."""
        told = {} if self.kinds is None else {"kinds": self.kinds}
        found: Tensor = encoder(self.ids, self.mask, self.places, **told)
        return found


class PairBatch(NamedTuple):
    """This worker's pairs of a step, as one formulation reads them."""

    parts: list[Texts]
    """By length, so that little of what goes through the model is padding."""
    order: Tensor
    """Places of the parts' rows, one part after the other, in the batch."""
    seed: int
    """Of the dropout noise."""

    def through(self, encoder: nn.Module) -> Tensor:
        """What an encoder makes of all texts, in the batch's order."""
        with dropout_rng(self.seed, self.order.device):
            found = torch.cat([part.through(encoder) for part in self.parts])
        return found[self.order.argsort()]


class BiPairs(nn.Module):
    """Both sentences of each pair, each as a text."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """2B sentences, the first ones before the second ones -> (B, d) and (B, d) vectors."""
        first, second = batch.through(self.encoder).chunk(2)
        return first, second


class CrossPairs(nn.Module):
    """Each pair as one text."""

    def __init__(self, encoder: CrossEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, batch: PairBatch) -> Tensor:
        """B pairs -> (B,) logits."""
        return batch.through(self.encoder)


def _batch(
    rows: Sequence[Row], kinds: Sequence[Row] | None, pad: int, seed: int, device: torch.device, filled: float
) -> PairBatch:
    # On a GPU one padded pass costs less than several small ones, or than one without its padding.
    on_cpu = device.type == "cpu"
    parts = alike([len(row) for row in rows], filled if on_cpu else 0.0)
    texts = []
    for part in parts:
        tokens = collate([rows[place] for place in part], pad, placed=on_cpu).to(device)
        sides = None if kinds is None else collate([kinds[place] for place in part], 0).to(device).ids
        texts.append(Texts(tokens.ids, tokens.mask, tokens.token_index, sides))
    return PairBatch(texts, to_device(torch.tensor([place for part in parts for place in part]), device), seed)


class BiTokens:
    """Token ids of pairs, each sentence once."""

    def __init__(self, encoder: Encoder, pairs: Pairs) -> None:
        unique = {text: place for place, text in enumerate(dict.fromkeys([*pairs.first, *pairs.second]))}
        self._rows: list[Row] = [
            np.array(ids, dtype=np.int32) for part in slices(list(unique)) for ids in encoder.token_ids(part)
        ]
        self._first = np.array([unique[text] for text in pairs.first])
        self._second = np.array([unique[text] for text in pairs.second])
        self._pad = encoder.tokenizer.pad_token_id or 0

    def __len__(self) -> int:
        return len(self._first)

    def batch(self, rows: NDArray[np.int64], seed: int, device: torch.device, filled: float = FILLED) -> PairBatch:
        """Pairs at these rows, in rectangles that are `filled` at least."""
        sentences = [self._rows[sentence] for sentence in (*self._first[rows], *self._second[rows])]
        return _batch(sentences, None, self._pad, seed, device, filled)

    def labels(self, labels: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n,) labels of pairs -> labels of rows."""
        return labels


class CrossTokens:
    """Token ids of pairs as a cross-encoder reads them, in one order or both: rows n to 2n - 1 are turned round."""

    def __init__(self, encoder: CrossEncoder, pairs: Pairs, both_orders: bool) -> None:
        read = list(pairs.both())
        self._orders = 2 if both_orders else 1
        if both_orders:
            read += [(second, first) for first, second in read]
        self._rows: list[Row] = []
        kinds: list[Row] = []
        for part in slices(read):
            found, told = encoder.token_ids(part)
            self._rows += [np.array(row, dtype=np.int32) for row in found]
            kinds += [np.array(row, dtype=np.int32) for row in told or []]
        self._kinds = kinds or None
        self._pad = encoder.tokenizer.pad_token_id or 0

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: NDArray[np.int64], seed: int, device: torch.device, filled: float = FILLED) -> PairBatch:
        """Pairs at these rows, in rectangles that are `filled` at least."""
        kinds = None if self._kinds is None else [self._kinds[row] for row in rows]
        return _batch([self._rows[row] for row in rows], kinds, self._pad, seed, device, filled)

    def labels(self, labels: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n,) labels of pairs -> labels of rows."""
        return np.tile(labels, self._orders)


def slices(rows: list[T]) -> Iterator[list[T]]:
    """Rows in parts that are tokenised at a time: as Python's integers all of them would fill the memory."""
    return (rows[begin : begin + _SLICE] for begin in range(0, len(rows), _SLICE))


class PairTask:
    """See `TrainingTask`. The model as it began is not scored: the best of a phase is one that learned in it.

    Args:
        encoder: What is trained.
        tokens: Its pairs.
        labels: (n,) labels of the pairs.
        section: The recipe's part for this formulation.
        dev: What picks the best; None takes the last.
        every: Steps of an epoch between two scores.
        seed: Of order and noise in this phase.
        rank: This worker's number.
        workers: How many there are.
        dev_precision: Arithmetic of the dev scores.
    """

    evaluates_initial_model = False
    patience: int | None = None
    teacher_wait_s = 0.0

    def __init__(
        self,
        encoder: Encoder | CrossEncoder,
        tokens: BiTokens | CrossTokens,
        labels: NDArray[np.float32],
        section: LoopSection,
        dev: DevPairs | None,
        every: int,
        seed: int,
        rank: int = 0,
        workers: int = 1,
        dev_precision: str = "fp32",
    ) -> None:
        self.model: BiPairs | CrossPairs = BiPairs(encoder) if isinstance(encoder, Encoder) else CrossPairs(encoder)
        self._tokens = tokens
        self._labels = torch.from_numpy(tokens.labels(labels))
        self._sampler = BatchSampler(len(tokens), section.batch_size, seed)
        self._dev_precision = dev_precision
        self._dev, self._every, self._seed, self._rank = dev, every, seed, rank
        self._batch_size, self._accumulation = section.batch_size, section.gradient_accumulation
        self.rows = section.batch_size // workers
        # Where weights are sharded, all workers must go through the layers equally often.
        self._filled = 0.0 if section.zero_stage == 3 and workers > 1 else FILLED
        self.steps = total_steps(section, self._sampler.steps_per_epoch)

    def on_start(self, first_step: int) -> None:
        """Labels are here already: nothing to request."""

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        rows, seed = self._mine(step), dropout_seed(self._seed, step, self._rank)
        labels = self._labels[torch.from_numpy(rows)]
        return StepInputs(self._tokens.batch(rows, seed, device, self._filled), to_device(labels, device))

    def compute_loss(self, inputs: Tensor, output: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if isinstance(output, Tensor):
            errors = bce_soft(output, inputs)
        else:
            first, second = output
            errors = mse_cosine(first, second, inputs)
        share = errors.sum() / self._batch_size
        return share, {"loss": share.detach()}

    def describe_batch(self, step: int) -> str:
        return describe_rows(self._sampler.batch(step).tolist(), "the pairs")

    def should_evaluate(self, done: int) -> bool:
        """At the first whole update from every `every`th step of an epoch, and from its last, on."""
        last = done - self._accumulation
        passed = self._milestones(done) - self._milestones(last)
        return done % self._accumulation == 0 and passed > 0

    def _milestones(self, done: int) -> int:
        """How many steps that call for a score lie at or before one."""
        epochs, in_epoch = divmod(max(done, 0), self._sampler.steps_per_epoch)
        return epochs * -(-self._sampler.steps_per_epoch // self._every) + in_epoch // self._every

    @property
    def metric_name(self) -> str | None:
        return self._dev.name if self._dev else None

    def evaluate(self) -> float:
        assert self._dev is not None
        return self._dev.score(pair_model(self.model.encoder, self._dev_precision))

    def _mine(self, step: int) -> NDArray[np.int64]:
        return self._sampler.batch(step)[self._rank * self.rows : (self._rank + 1) * self.rows]


def pair_model(
    encoder: Encoder | CrossEncoder, precision: str = "fp32", on_progress: Progress | None = None
) -> PairModel:
    """An encoder as something that scores pairs: raw cosines, or sigmoid outputs."""
    if isinstance(encoder, Encoder):
        return VectorModel.of(encoder, precision, on_progress)
    return PairScores(encoder, on_progress, precision)
