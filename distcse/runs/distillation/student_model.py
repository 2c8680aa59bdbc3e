"""A student as it is trained: encoder, projection and discriminator, and what it computes in a step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from distcse.devices.device import is_gpu
from distcse.devices.distributed import all_reduce_max, world_size
from distcse.devices.host import trim
from distcse.losses import Detection
from distcse.models import Encoder, build_projection
from distcse.models.detection import EditDetector, build_detector
from distcse.recipe import DetectionSection, Recipe, StudentSection, decided
from distcse.runs.directory import PROJECTION
from distcse.storage import ArtifactStore
from distcse.teachers.targets import Projection
from distcse.text.collate import Tokens
from distcse.training.dropout_rng import dropout_rng

T = TypeVar("T")


class Batch(NamedTuple):
    """The model's input in one step on this worker."""

    streams: Sequence[tuple[Tokens, int]]
    """The worker's R rows, split into streams with a dropout seed each."""
    edit_seeds: Sequence[int] = ()
    """The seed of each stream's edits, if there is a discriminator."""


class StudentOutput(NamedTuple):
    """The model's output for this worker's R rows."""

    z1: Tensor
    """(R, d) float32 first views, stream after stream."""
    z2: Tensor
    """(R, d) float32 second views."""
    detection: Detection | None
    """The discriminator's output for both views; None without a discriminator."""


class StudentModel(nn.Module):
    """Encoder and projection that compute two views of each sentence in one forward pass.

    Args:
        encoder: The student.
        projection: Head between the encoder's vectors and the loss.
        detector: DiffCSE's generator and discriminator; None trains without replaced token detection.
        condition: Vectors that condition the discriminator: `projected` or `pooled`.
        grad_cache: Recompute each stream's activations in the backward pass (GradCache, Gao et al. 2021), so that only one
            stream's activations are in memory. The last stream's are kept: its backward pass comes first.
    """

    def __init__(
        self,
        encoder: Encoder,
        projection: nn.Module,
        detector: EditDetector | None = None,
        condition: str = "projected",
        grad_cache: bool = False,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.detector = detector
        self.condition = condition
        self.grad_cache = grad_cache

    def forward(self, batch: Batch) -> StudentOutput:
        """Compute both views of a batch, and the discriminator's output if there is one.

        The dropout masks of a stream depend only on its seed. A run that resumes with another number of workers assigns
        them the same streams, and thus the same masks. One forward pass computes both views of a stream, over twice its
        rows. The projection gets both views of all streams at once, because batch norm needs them together.
        """
        last = len(batch.streams) - 1 if self.detector is None else None
        views = [
            self._run_stream(self._encode_views, tokens, seed, keep_activations=number == last)
            for number, (tokens, seed) in enumerate(batch.streams)
        ]
        first = torch.cat([pooled[: len(pooled) // 2] for pooled in views])
        second = torch.cat([pooled[len(pooled) // 2 :] for pooled in views])
        pooled = torch.cat([first, second])
        projected = self.projection(pooled)
        z1, z2 = projected.float().chunk(2)
        condition = projected if self.condition == "projected" else pooled
        return StudentOutput(z1, z2, None if self.detector is None else self._detect(batch, condition))

    def _detect(self, batch: Batch, condition: Tensor) -> Detection:
        """Run the discriminator over all streams. Each view of a stream gets different edits, drawn from the stream's edit seed.

        Args:
            batch: The worker's R rows.
            condition: (2R, d) vectors of the first views, then of the second.
        """
        assert self.detector is not None
        length = self.padded_length(batch)
        first, second = condition.chunk(2)
        detections, done = [], 0
        for number, ((tokens, _), seed) in enumerate(zip(batch.streams, batch.edit_seeds, strict=True), start=1):
            rows = slice(done, done + len(tokens.ids))
            done = rows.stop
            vectors = torch.cat([first[rows], second[rows]])
            is_last = number == len(batch.streams)
            detections.append(
                self._run_stream(self._detect_stream, tokens, seed, vectors, length, keep_activations=is_last)
            )
        total: Detection = reduce(operator.add, detections)
        return total

    def padded_length(self, batch: Batch) -> int | Tensor | None:
        """Return the length that the global batch's sentences are padded to, on a GPU as a scalar.

        None if the loss ignores padding, or if a single pass contains the entire global batch.
        """
        assert self.detector is not None
        if not self.detector.counts_padding or (len(batch.streams) == 1 and world_size() == 1):
            return None
        widths = [tokens.ids.shape[1] for tokens, _ in batch.streams]
        longest = all_reduce_max(torch.full((), max(widths), device=batch.streams[0][0].ids.device))
        return longest if is_gpu(longest.device) else int(longest)

    def _detect_stream(self, tokens: Tokens, seed: int, condition: Tensor, length: int | Tensor | None) -> Detection:
        assert self.detector is not None
        with dropout_rng(seed, tokens.ids.device):
            detection: Detection = self.detector(tokens.twice(), condition, length)
        return detection

    def _run_stream(self, forward: Callable[..., T], tokens: Tokens, *inputs: Any, keep_activations: bool) -> T:
        """Run one stream, by default without keeping its activations if `grad_cache` is on.

        `forward` seeds its own dropout, so the recomputation draws the same masks without saving the RNG state.
        """
        if not self.grad_cache:
            return forward(tokens, *inputs)
        output: T = (
            forward(tokens, *inputs)
            if keep_activations
            else checkpoint(forward, tokens, *inputs, use_reentrant=False, preserve_rng_state=False)
        )
        if is_gpu(tokens.ids.device):
            return output
        # Small blocks that stay for the backward pass fragment the heap: glibc 2.36 does not reuse freed aligned blocks of the
        # same size. Without trimming, every stream would allocate new memory.
        trim()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(
                lambda _: trim()
            )  # in the backward pass, frees the memory of the stream after this one
        return output

    def _encode_views(self, tokens: Tokens, seed: int) -> Tensor:
        """Encode r rows into (2r, d) pooled vectors: the first views, then the second."""
        with dropout_rng(seed, tokens.ids.device):  # also without dropout: a recorded step uses all of its seeds
            if not self.encoder.has_dropout:
                pooled = self.encoder(tokens.ids, tokens.mask, tokens.token_index)
                return torch.cat([pooled, pooled])  # both views are equal without dropout: half the work, same gradient
            both = tokens.twice()
            views: Tensor = self.encoder(both.ids, both.mask, both.token_index)
        return views


def initial_student(section: StudentSection, run: ArtifactStore | None) -> Encoder:
    """Load a student as it is before training; without the folder of its run, before its map into a teacher's index."""
    encoder = Encoder.from_section(section)
    if run is not None and section.index_of is not None:
        encoder.append_linear(Projection.read((run / PROJECTION).path).matrix)
    return encoder


def build_encoder(section: StudentSection, run: ArtifactStore | None = None) -> StudentModel:
    """Build a student of encoder and projection only. The projection's weights come from the global random state."""
    encoder = initial_student(section, run)
    return StudentModel(encoder, build_projection(section.projection, encoder.dimension))


def build_student(recipe: Recipe, run: ArtifactStore | None = None) -> StudentModel:
    """Build a recipe's student. The weights of the projection and the discriminator's head come from the global random state."""
    student, objective = build_encoder(recipe.student, run), recipe.objective
    student.grad_cache = recipe.training.grad_cache_chunk is not None
    if (detection := objective.active(DetectionSection)) is not None:
        fresh = Encoder.from_section(recipe.student)
        student.detector = build_detector(detection, student.encoder, fresh, decided(recipe.training.precision))
        student.condition = detection.condition
    return student


def encoder_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the encoder's weights from those of a student model, under the encoder's own names."""
    return {name.removeprefix("encoder."): weight for name, weight in weights.items() if name.startswith("encoder.")}
