"""What the student's engine trains: the encoder, its projection, and a discriminator where the recipe has one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcse.data.collate import Tokens
from distcse.detection import EditDetector, build_detector
from distcse.experiments.distillation.embedding_queue import EmbeddingQueue, gather_parts
from distcse.losses import Detection
from distcse.models import Encoder, build_projection
from distcse.recipe import Recipe, StudentSection, decided
from distcse.trainer.allocator import trim
from distcse.trainer.distributed import all_reduce_max, world_size
from distcse.trainer.dropout_rng import dropout_rng

T = TypeVar("T")


class Batch(NamedTuple):
    """One step's input on this worker."""

    streams: Sequence[tuple[Tokens, int]]
    """Its rows, in parts with a seed of dropout noise each."""
    anchors: Sequence[Tokens] = ()
    """This worker's part of the landmarks, where they are to be encoded anew."""
    queue: Sequence[Tokens] = ()
    """This worker's part of the sentences that fill the queue before the first step."""


class StudentOutput(NamedTuple):
    """One pass over this worker's rows."""

    z1: Tensor
    """(R, d) float32 first views: the streams' rows one after the other."""
    z2: Tensor
    """(R, d) float32 second views."""
    found: Detection | None
    """What the discriminator made of both views' sentences."""


class StudentModel(nn.Module):
    """Encoder and projection, two views of every sentence by one forward pass; perhaps a discriminator.

    Args:
        encoder: The student.
        projection: The head between its vectors and the objective.
        detector: What DiffCSE adds.
        condition: Vector that the discriminator is told: `projected` or `pooled`.
        memory: What lengthens the lists.
        grad_cache: Whether what a stream leaves on its way is forgotten, and made again for the gradient (gradient cache, Gao et
            al. 2021): only one stream's activations are there at a time. The last one's are kept, as it is the first whose
            gradient is asked for.
    """

    def __init__(
        self,
        encoder: Encoder,
        projection: nn.Module,
        detector: EditDetector | None = None,
        condition: str = "projected",
        memory: EmbeddingQueue | None = None,
        grad_cache: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.detector = detector
        self.condition = condition
        self.memory = memory
        self.grad_cache = grad_cache

    def forward(self, batch: Batch) -> StudentOutput:
        """A batch -> views, and detection where there is a discriminator.

        A stream is a part of the batch with dropout noise of its own, drawn from its seed alone. A run that goes on with
        another number of workers deals the same streams to them and so draws the same noise. Both views of a stream are
        one pass over twice its rows; both views of all streams are projected together, as batch norm wants.
        """
        if self.memory is not None and batch.anchors:
            self.memory.refresh(gather_parts(self._encode_no_grad(batch.anchors), len(self.memory.anchors)))
        if self.memory is not None and batch.queue:
            self.memory.fill(gather_parts(self._encode_no_grad(batch.queue), len(self.memory.queue)))
        last = len(batch.streams) - 1 if self.detector is None else None
        views = [
            self._through(self._views, tokens, seed, keeps=number == last)
            for number, (tokens, seed) in enumerate(batch.streams)
        ]
        first = torch.cat([pooled[: len(pooled) // 2] for pooled in views])
        second = torch.cat([pooled[len(pooled) // 2 :] for pooled in views])
        pooled = torch.cat([first, second])
        projected = self.projection(pooled)
        z1, z2 = projected.float().chunk(2)
        told = projected if self.condition == "projected" else pooled
        return StudentOutput(z1, z2, None if self.detector is None else self._detect(batch.streams, told))

    def _detect(self, streams: Sequence[tuple[Tokens, int]], told: Tensor) -> Detection:
        """Both views of each stream have edits of their own, drawn from the stream's seed."""
        assert self.detector is not None
        length = self._edited_length(streams)
        first, second = told.chunk(2)
        found, done = [], 0
        for number, (tokens, seed) in enumerate(streams, start=1):
            rows = slice(done, done + len(tokens.ids))
            done = rows.stop
            told_here = torch.cat([first[rows], second[rows]])
            found.append(self._through(self._found, tokens, seed, told_here, length, keeps=number == len(streams)))
        total: Detection = reduce(operator.add, found)
        return total

    def _edited_length(self, streams: Sequence[tuple[Tokens, int]]) -> int | None:
        """Length of the global batch's edited sentences; None where padding does not count, or one pass holds all of them."""
        assert self.detector is not None
        if not self.detector.counts_padding or (len(streams) == 1 and world_size() == 1):
            return None
        longest = 0
        for tokens, seed in streams:
            with dropout_rng(seed + 1, tokens.ids.device):
                longest = max(longest, self.detector.edited_length(tokens.twice()))
        return all_reduce_max(longest, tokens.ids.device)

    def _found(self, tokens: Tokens, seed: int, told: Tensor, length: int | None) -> Detection:
        assert self.detector is not None
        with dropout_rng(seed + 1, tokens.ids.device):
            found: Detection = self.detector(tokens.twice(), told, length)
        return found

    def _through(self, part: Callable[..., T], *inputs: Any, keeps: bool) -> T:
        """One stream's pass. Its noise comes from its seed, so a second pass for the gradient draws what the first one drew."""
        if not self.grad_cache:
            return part(*inputs)
        found: T = part(*inputs) if keeps else checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False)
        # What a stream leaves for the way back are small pieces between its tensors. The holes of those fit no other stream's
        # (glibc 2.36: aligned blocks do not go into holes of their own size), so every stream would take memory of its own.
        trim()
        if isinstance(found, Tensor) and found.requires_grad:
            found.register_hook(lambda _: trim())  # on the way back: what the stream after it left
        return found

    @torch.no_grad()
    def _encode_no_grad(self, parts: Sequence[Tokens]) -> Tensor:
        """(n, d) projected vectors, without dropout or gradient."""
        was_training = self.training
        self.eval()
        vectors = torch.cat([self.projection(self.encoder(part.ids, part.mask)).float() for part in parts])
        self.train(was_training)
        torch.clear_autocast_cache()  # older versions would give the weights cast here, which have no gradient, to what follows
        return vectors

    def _views(self, tokens: Tokens, seed: int) -> Tensor:
        device = tokens.ids.device
        if not self.encoder.has_dropout:
            pooled = self.encoder(tokens.ids, tokens.mask, tokens.token_index)
            return torch.cat(
                [pooled, pooled]
            )  # without noise the second view is the first: half the work, same gradient
        with dropout_rng(seed, device):
            both = tokens.twice()
            views: Tensor = self.encoder(both.ids, both.mask, both.token_index)
        return views


def build_encoder(section: StudentSection) -> StudentModel:
    """A student of an encoder and its projection alone; the projection fresh from the current random state."""
    encoder = Encoder.from_section(section)
    return StudentModel(encoder, build_projection(section.projection, encoder.dimension))


def build_student(recipe: Recipe) -> StudentModel:
    """The student of a recipe; projection and discriminator's head fresh from the current random state."""
    student, objective = build_encoder(recipe.student), recipe.objective
    student.grad_cache = recipe.training.grad_cache_chunk is not None
    if (longer := objective.memory) is not None:
        queued = longer.num_batches * recipe.training.batch_size
        student.memory = EmbeddingQueue(queued, longer.num_anchors, student.encoder.dimension)
    if (detection := objective.detection) is not None and detection.weight:
        fresh = Encoder.from_section(recipe.student)
        student.detector = build_detector(detection, student.encoder, fresh, decided(recipe.training.precision))
        student.condition = detection.condition
    return student


def encoder_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a student model's weights those of its encoder, under the encoder's own names."""
    return {name.removeprefix("encoder."): weight for name, weight in weights.items() if name.startswith("encoder.")}
