"""What the student's engine trains: the encoder and its projection."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from distcse.corpus.collate import Tokens
from distcse.encoder.encoder import Encoder
from distcse.encoder.projection import build_projection
from distcse.recipe import StudentSection


class StudentModel(nn.Module):
    """Encoder and projection; two views of every sentence by one forward pass."""

    def __init__(self, encoder: Encoder, projection: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection

    def forward(self, streams: Sequence[tuple[Tokens, int]]) -> tuple[Tensor, Tensor]:
        """Streams of (tokens, seed) -> (z1, z2), each (R, d) in float32: the streams' rows one after the other.

        A stream is a part of the batch with dropout noise of its own, drawn from its seed alone. A run that goes on with
        another number of workers deals the same streams to them and so draws the same noise. Both views of a stream are
        one pass over twice its rows; both views of all streams are projected together, as batch norm wants.
        """
        views = [self._views(tokens, seed) for tokens, seed in streams]
        first = torch.cat([pooled[: len(pooled) // 2] for pooled in views])
        second = torch.cat([pooled[len(pooled) // 2 :] for pooled in views])
        z1, z2 = self.projection(torch.cat([first, second])).float().chunk(2)
        return z1, z2

    def _views(self, tokens: Tokens, seed: int) -> Tensor:
        device = tokens.ids.device
        if not self.encoder.has_dropout:
            pooled = self.encoder(tokens.ids, tokens.mask)
            return torch.cat(
                [pooled, pooled]
            )  # without noise the second view is the first: half the work, same gradient
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            both: Tensor = self.encoder(tokens.ids.repeat(2, 1), tokens.mask.repeat(2, 1))
        return both


def build_student(section: StudentSection) -> StudentModel:
    """The student of a recipe, its projection fresh from the current random state."""
    encoder = Encoder.from_section(section)
    return StudentModel(encoder, build_projection(section.projection, encoder.dimension))
