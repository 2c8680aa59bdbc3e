"""The training task of one phase of one group: a bi- or cross-encoder, its pairs, and the labels from the groups' scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcse.devices.device import defaults_of, to_device
from distcse.evaluation import Dev, PairModel, PairScores, VectorModel
from distcse.events import Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.models.student import WeightInterpolation
from distcse.recipe import LoopSection
from distcse.runs.mutual.pseudo_labels import bce_soft, mse_cosine
from distcse.text import BatchSampler, Pairs, PairTokenTable, TokenTable
from distcse.text.collate import collate
from distcse.training.dropout_rng import dropout_rng, dropout_seed
from distcse.training.schedule import total_steps
from distcse.training.step_log import stop_of_score
from distcse.training.task import StepInputs, describe_rows

Row = NDArray[np.integer]
MIN_LENGTH_RATIO = 0.5
"""Smallest ratio of the shortest to the longest text in a padded tensor."""


class Texts(NamedTuple):
    """b texts of similar length, padded to (b, L)."""

    ids: Tensor
    """(b, L) token ids."""
    mask: Tensor
    """(b, L) attention mask."""
    token_index: Tensor | None
    """(T,) indices of the tokens in the flat batch (see `Tokens`); None encodes the padding too."""
    kinds: Tensor | None
    """(b, L) token type ids, for cross-encoders that have them."""

    def encode(self, encoder: nn.Module) -> Tensor:
        """Return the encoder's b outputs."""
        optional = {} if self.kinds is None else {"kinds": self.kinds}
        output: Tensor = encoder(self.ids, self.mask, self.token_index, **optional)
        return output


class PairBatch(NamedTuple):
    """The texts of one dropout random stream in a step: all pairs of the batch, or a part of them."""

    parts: list[Texts]
    """The texts, grouped by length to reduce padding."""
    order: Tensor
    """Index in the batch of each text, part after part."""
    seed: int
    """Dropout seed."""
    recomputes: bool = False
    """Recompute each part's activations in the backward pass (GradCache, Gao et al. 2021), so that only one part's are in memory.
    Each part then has its own dropout seed."""

    def encode(self, encoder: nn.Module, is_last: bool = True) -> Tensor:
        """Return the encoder's outputs for all texts, in the batch's order."""
        if self.recomputes:
            outputs = torch.cat([self._encode_part(encoder, number, is_last) for number in range(len(self.parts))])
        else:
            with dropout_rng(self.seed, self.order.device):
                outputs = torch.cat([part.encode(encoder) for part in self.parts])
        return outputs[self.order.argsort()]

    def _encode_part(self, encoder: nn.Module, number: int, is_last: bool) -> Tensor:
        def forward(part: Texts) -> Tensor:
            with dropout_rng(dropout_seed(self.seed, 0, number), self.order.device):
                return part.encode(encoder)

        part = self.parts[number]
        if is_last and number == len(self.parts) - 1:  # its backward pass comes first
            return forward(part)
        outputs: Tensor = checkpoint(forward, part, use_reentrant=False, preserve_rng_state=False)
        return outputs


class BiPairs(nn.Module):
    """A bi-encoder for training: encodes the two sentences of each pair separately."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, streams: Sequence[PairBatch]) -> tuple[Tensor, Tensor]:
        """Encode 2B sentences into two tensors of (B, d) vectors. In each stream, the first sentences precede the second ones."""
        halves = [vectors.chunk(2) for vectors in encode_streams(self.encoder, streams)]
        return torch.cat([first for first, _ in halves]), torch.cat([second for _, second in halves])


class CrossPairs(nn.Module):
    """A cross-encoder for training: reads each pair as one text."""

    def __init__(self, encoder: CrossEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, streams: Sequence[PairBatch]) -> Tensor:
        """Compute the (B,) logits of B pairs."""
        return torch.cat(encode_streams(self.encoder, streams))


def encode_streams(encoder: nn.Module, streams: Sequence[PairBatch]) -> list[Tensor]:
    """Return the encoder's outputs of each stream."""
    return [batch.encode(encoder, number == len(streams)) for number, batch in enumerate(streams, start=1)]


@dataclass(frozen=True)
class PairTokens:
    """Token ids of n pairs, which a task takes its batches from."""

    number: int
    """Number of rows: n, or 2n in both orders, where rows n to 2n - 1 are the pairs with their sentences swapped."""
    texts: Callable[[NDArray[np.int64]], tuple[list[Row], list[Row] | None]]
    """Returns the token ids of the texts of the pairs at these rows, and their token type ids; None without type ids."""
    pad_id: int
    max_length: int

    @classmethod
    def bi(cls, encoder: Encoder, pairs: Pairs, table: TokenTable) -> PairTokens:
        """Take the first sentences of the pairs, then the second ones, from the table of their distinct sentences."""

        def texts(rows: NDArray[np.int64]) -> tuple[list[Row], None]:
            return table.rows(pairs.rows[rows].T.reshape(-1).astype(np.int64)), None

        return cls(len(pairs), texts, table.pad_id, encoder.max_length)

    @classmethod
    def cross(cls, encoder: CrossEncoder, table: PairTokenTable) -> PairTokens:
        """Take each pair as one text from the table."""
        return cls(len(table), table.rows, table.pad_id, encoder.max_length)

    def batch(
        self,
        rows: NDArray[np.int64],
        seed: int,
        device: torch.device,
        length_ratio: float = MIN_LENGTH_RATIO,
        passes: int = 1,
    ) -> PairBatch:
        """Collate the pairs at these (B,) rows.

        On CPUs, texts are padded together whose lengths have at least the ratio `length_ratio`. From two passes on, the texts
        are split among that many forward passes, whose activations are recomputed.
        """
        texts, kinds = self.texts(rows)
        # On a GPU, one padded pass is faster than several small ones, and than one that skips padding.
        on_cpu = device.type == "cpu"
        parts = group_similar_lengths([len(text) for text in texts], length_ratio if on_cpu else 0.0)
        if passes > 1:
            size = -(-len(texts) // passes)
            parts = [part[begin : begin + size] for part in parts for begin in range(0, len(part), size)]
        collated = []
        for part in parts:
            width = defaults_of(device).width_multiple, self.max_length
            tokens = collate([texts[index] for index in part], self.pad_id, on_cpu, *width).to(device)
            part_kinds = None if kinds is None else collate([kinds[index] for index in part], 0, False, *width)
            kind_ids = None if part_kinds is None else part_kinds.to(device).ids
            collated.append(Texts(tokens.ids, tokens.mask, tokens.token_index, kind_ids))
        order = to_device(torch.tensor([index for part in parts for index in part]), device)
        return PairBatch(collated, order, seed, recomputes=passes > 1)


class PairTask:
    """Trains a bi- or cross-encoder on the labels of pairs (see `TrainingTask`).

    The initial model is not evaluated, so that the best model of a phase is one that was trained in it.

    Args:
        encoder: The model to train.
        tokens: The tokenized pairs.
        labels: (n,) labels of the pairs, which may be memory-mapped.
        section: The recipe's training section of the formulation.
        dev: Dev pairs that select the best model; None selects the last.
        eval_steps: Steps between two dev scores within an epoch.
        seed: Seed of row order and dropout.
        rank: Rank of this worker.
        workers: Number of workers.
        dev_precision: Precision of the dev scores' forward passes.
        passes: Number of forward passes of a stream, each with a part of its pairs. From two on, the backward pass
            recomputes activations, so that memory shrinks with the number. The gradient differs from that of one pass by
            rounding, and by its dropout masks. Default: 1.
        streams: Parts of the global batch with a dropout random stream each, a multiple of `workers`. With equal streams, any
            number of workers has the same gradient up to the order of its sum. Default: one per worker.
        init_weight_mix: Weight of a bi-encoder's initial parameters in the model that is scored. Default: 0.
        reporter: Its stop request ends a dev score. Default: none.
    """

    evaluates_initial_model = False
    teacher_wait_s = 0.0

    def __init__(
        self,
        encoder: Encoder | CrossEncoder,
        tokens: PairTokens,
        labels: NDArray[np.float32],
        section: LoopSection,
        dev: Dev | None,
        eval_steps: int,
        seed: int,
        rank: int = 0,
        workers: int = 1,
        dev_precision: str = "fp32",
        passes: int = 1,
        streams: int | None = None,
        init_weight_mix: float = 0.0,
        reporter: Reporter | None = None,
    ) -> None:
        self._check_stop = stop_of_score(reporter or Reporter())
        self.model: BiPairs | CrossPairs = BiPairs(encoder) if isinstance(encoder, Encoder) else CrossPairs(encoder)
        self._tokens = tokens
        self.labels = labels
        self._sampler = BatchSampler(tokens.number, section.batch_size, seed)
        self._dev_precision, self._passes = dev_precision, passes
        self._mixed: Callable[[], AbstractContextManager[None]] = nullcontext
        if isinstance(encoder, Encoder):
            self._mixed = partial(WeightInterpolation(encoder, init_weight_mix).applied_to, encoder)
        self._dev, self._eval_steps, self._seed, self._rank = dev, eval_steps, seed, rank
        self._batch_size, self._accumulation = section.batch_size, section.gradient_accumulation
        self.rows = section.batch_size // workers
        streams = streams or workers
        own_streams = streams // workers
        self._streams = range(rank * own_streams, (rank + 1) * own_streams)
        self.rows_per_stream = section.batch_size // streams
        # With sharded weights (ZeRO 3), all workers must make the same number of forward passes.
        self._length_ratio = 0.0 if section.zero_stage == 3 and streams > 1 else MIN_LENGTH_RATIO
        self.steps = total_steps(section, self._sampler.steps_per_epoch)

    def on_start(self, first_step: int) -> None:
        """Do nothing: the labels are there."""

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        rows = self.rank_rows(step)
        labels = torch.from_numpy(self.labels[rows % len(self.labels)])  # both orders of a pair have one label
        streams = [
            self._tokens.batch(part, dropout_seed(self._seed, step, stream), device, self._length_ratio, self._passes)
            for stream, part in zip(self._streams, np.split(rows, len(self._streams)), strict=True)
        ]
        return StepInputs(streams, to_device(labels, device))

    def compute_loss(self, inputs: Tensor, output: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
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
        """Return whether an evaluation became due since the last optimizer update, and one ends at `done`.

        Evaluations are due at each `eval_steps`th step of an epoch, and at its last step.
        """
        last_update = done - self._accumulation
        due = self._num_due(done) - self._num_due(last_update)
        return done % self._accumulation == 0 and due > 0

    def _num_due(self, done: int) -> int:
        """Count the steps up to `done` at which evaluations are due."""
        epochs, in_epoch = divmod(max(done, 0), self._sampler.steps_per_epoch)
        return epochs * -(-self._sampler.steps_per_epoch // self._eval_steps) + in_epoch // self._eval_steps

    @property
    def metric_name(self) -> str | None:
        return self._dev.name if self._dev else None

    def evaluate(self) -> float:
        assert self._dev is not None
        with self._mixed():
            return self._dev.score(pair_model(self.model.encoder, self._dev_precision, self._check_stop))

    def rank_rows(self, step: int) -> NDArray[np.int64]:
        """Return the rows of this worker's part of a step's batch."""
        return self._sampler.batch(step)[self._rank * self.rows : (self._rank + 1) * self.rows]


def pair_model(
    encoder: Encoder | CrossEncoder,
    precision: str = "fp32",
    on_progress: Callable[..., None] | None = None,
) -> PairModel:
    """Wrap an encoder as a model of pairs."""
    if isinstance(encoder, Encoder):
        return VectorModel.of(encoder, precision, on_progress)
    return PairScores(encoder, on_progress, precision)


def group_similar_lengths(lengths: Sequence[int], min_ratio: float) -> list[list[int]]:
    """Return groups of row indices, longest rows first, of similar lengths.

    Args:
        lengths: Number of tokens in each row.
        min_ratio: Smallest ratio of a group's shortest row to its longest; 0 puts all rows into one group.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index], reverse=True):
        if not groups or lengths[index] < min_ratio * lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(index)
    return groups
