"""Ways to a faster training step that a GPU has to choose from, interleaved: none is in distcse before it gains.

    python -m benchmarks.step_variants                    a table: ms of each way, and its ratio to today's
    python -m benchmarks.step_variants --device cpu --tiny    whether all of them work

A BERT trunk of random weights, here in plain PyTorch, [CLS] pooling, vectors as targets, AdamW; the entire step is recorded as a
CUDA graph. Texts have the lengths of Wikipedia's sentences (lengths.json), cut at 32 tokens.

layers       each layer compiled, bf16 by autocast, a padded batch: as distcse does it
trunk        all layers, embedding and pooling compiled as one graph
half         weights and gradients in bf16, of which the optimizer holds fp32 masters
blocks       four rows' attention as one block of 128 tokens under a block-diagonal mask
unpadded     no padding from the embedding on; all tokens up to a multiple of 256; variable-length attention
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

WAYS = {
    "layers": (),
    "trunk": ("trunk",),
    "half": ("half",),
    "trunk, half": ("trunk", "half"),
    "trunk, half, blocks": ("trunk", "half", "blocks"),
    "trunk, half, unpadded": ("trunk", "half", "unpadded"),
}
BUCKET, BLOCK = 256, 4
"""Multiple of tokens of an unpadded batch; rows of a block."""
_WARM_UP, _STEPS = 5, 20


@dataclass(frozen=True)
class Sizes:
    """A trunk's sizes, and a batch's."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 30_522
    rows: int = 256
    """Two views of 128 sentences."""
    length: int = 32


TINY = Sizes(layers=2, width=128, heads=2, words=200, rows=16)


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, padded or not."""

    ids: Tensor
    """(R, L), or (T,) without padding."""
    places: Tensor
    """Positions in the rows, of the shape of `ids`."""
    mask: Tensor
    """(R, 1, 1, L) true at tokens; by blocks (R / 4, 1, 4 L, 4 L); without padding the int32 ends of the rows and of
    rows of padding, from 0."""
    first: Tensor
    """(R,) places of the rows' first tokens among all tokens."""

    @classmethod
    def of(cls, lengths: Tensor, sizes: Sizes, way: tuple[str, ...], device: str) -> Batch:
        """Draw tokens for rows of (R,) lengths, the same for every way."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, sizes.words, (sizes.rows, sizes.length), generator=generator)
        places = torch.arange(sizes.length).expand_as(ids)
        visible = places < lengths[:, None]
        first = torch.arange(sizes.rows) * sizes.length
        mask = visible[:, None, None, :]
        if "unpadded" in way:
            total = int(lengths.sum())
            more = -total % BUCKET
            ids = torch.cat([ids[visible], torch.zeros(more, dtype=torch.int64)])
            places = torch.cat([places[visible], torch.arange(more) % sizes.length])
            ends = torch.tensor([*range(total + sizes.length, total + more, sizes.length), total + more])
            mask = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0), ends]).int()
            first = mask[: sizes.rows].long()
        elif "blocks" in way:
            rows = torch.arange(BLOCK * sizes.length) // sizes.length
            keys = visible.reshape(-1, 1, 1, BLOCK * sizes.length)
            mask = keys & (rows[:, None] == rows[None, :])
        return cls(*(each.to(device) for each in (ids, places, mask, first)))


class Layer(nn.Module):
    """A layer of BERT."""

    def __init__(self, sizes: Sizes, way: tuple[str, ...], dropout: float) -> None:
        super().__init__()
        width = sizes.width
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.dropout, self.heads, self.way, self.length = nn.Dropout(dropout), sizes.heads, way, sizes.length

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.inputs(hidden).chunk(3, dim=-1)
        attended = self.output(self.attend(query, key, value, mask))
        hidden = self.norms[0](hidden + self.dropout(attended))
        mapped: Tensor = self.norms[1](hidden + self.dropout(self.down(functional.gelu(self.up(hidden)))))
        return mapped

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Attention of (R, L, h) or (T, h) queries, keys and values, without dropout of its probabilities."""
        if "unpadded" in self.way:
            query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in (query, key, value))
            return _varlen(query, key, value, mask, self.length).flatten(1)
        rows, shape = (BLOCK if "blocks" in self.way else 1), query.shape
        parts = [
            part.reshape(-1, rows * shape[1], shape[2]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (query, key, value)
        ]
        return functional.scaled_dot_product_attention(*parts, attn_mask=mask).transpose(1, 2).reshape(shape)


def _varlen(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int) -> Tensor:
    if query.device.type == "cpu":  # has no variable-length kernel
        rows = torch.bucketize(torch.arange(len(query)), ends[1:], right=True)
        parts = [part.transpose(0, 1) for part in (query, key, value)]
        return functional.scaled_dot_product_attention(*parts, attn_mask=rows[:, None] == rows[None, :]).transpose(0, 1)
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(query, key, value, ends, ends, longest, longest)
    assert isinstance(found, Tensor)
    return found


class Trunk(nn.Module):
    """Embedding, layers, and the first token's vector."""

    def __init__(self, sizes: Sizes, way: tuple[str, ...], dropout: float = 0.1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(sizes.words, sizes.width), nn.Embedding(sizes.length, sizes.width)
        self.norm, self.dropout = nn.LayerNorm(sizes.width), nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(sizes, way, dropout) for _ in range(sizes.layers))

    def forward(self, batch: Batch) -> Tensor:
        """Return (R, h) vectors."""
        hidden = self.dropout(self.norm(self.words(batch.ids) + self.places(batch.places)))
        for layer in self.layers:
            hidden = layer(hidden, batch.mask)
        return hidden.flatten(0, -2)[batch.first]


class Masters:
    """AdamW over fp32 masters of half-precision weights."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self._weights = weights
        self._masters = [weight.detach().float() for weight in weights]
        self._adam = adam(self._masters)

    @torch.no_grad()
    def step(self) -> None:
        for master, weight in zip(self._masters, self._weights, strict=True):
            master.grad = weight.grad.float() if weight.grad is not None else None
        self._adam.step()
        torch._foreach_copy_(list(self._weights), self._masters)


def adam(weights: list[Tensor] | list[nn.Parameter]) -> torch.optim.AdamW:
    on_gpu = weights[0].device.type != "cpu"
    return torch.optim.AdamW(weights, lr=1e-4, fused=on_gpu, capturable=on_gpu)


def step_of(sizes: Sizes, way: tuple[str, ...], device: str, dropout: float = 0.1, compiled: bool = True) -> Step:
    """Build a way's step, with the same weights, tokens and targets as those of every other way."""
    torch.manual_seed(0)
    trunk = Trunk(sizes, way, dropout).to(device)
    lengths = torch.from_numpy(np.resize(_lengths(), sizes.rows)).clamp(3, sizes.length)
    batch = Batch.of(lengths, sizes, way, device)
    targets = torch.randn(sizes.rows, sizes.width, generator=torch.Generator().manual_seed(1)).to(device)
    if "half" in way:
        trunk.to(torch.bfloat16)
    weights = list(trunk.parameters())
    update = Masters(weights).step if "half" in way else adam(weights).step
    forward: Callable[[Batch], Tensor] = trunk
    if compiled and "trunk" in way:
        forward = torch.compile(trunk)
    elif compiled:
        for layer in trunk.layers:
            layer.compile()
    return Step(trunk, forward, batch, targets, update, device, uses_autocast="half" not in way)


def _lengths() -> NDArray[np.int64]:
    counts = json.loads((Path(__file__).parent / "lengths.json").read_text())["truncated_32"]
    return np.random.default_rng(0).permutation(np.repeat([int(length) for length in counts], list(counts.values())))


@dataclass
class Step:
    """A training step."""

    trunk: Trunk
    forward: Callable[[Batch], Tensor]
    batch: Batch
    targets: Tensor
    update: Callable[[], object]
    device: str
    uses_autocast: bool

    def __call__(self) -> Tensor:
        """Take a step; return its loss."""
        self.trunk.zero_grad()
        loss = self.loss()
        loss.backward()
        self.update()
        return loss.detach()

    def loss(self) -> Tensor:
        """Return one minus the mean cosine of the vectors and their targets."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.uses_autocast):
            vectors = self.forward(self.batch)
        return 1 - functional.cosine_similarity(vectors.float(), self.targets).mean()

    def recorded(self) -> Callable[[], object]:
        """Record the step as a CUDA graph; on a CPU, return it as it is."""
        if self.device == "cpu":
            return self
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self()
        return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    sizes, synchronize = TINY if options.tiny else Sizes(), torch.cuda.synchronize if options.device == "cuda" else int
    steps = {}
    for name, way in WAYS.items():
        try:
            steps[name] = step_of(sizes, way, options.device).recorded()
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            synchronize()
            began = time.perf_counter()
            for _ in range(_STEPS):
                step()
            synchronize()
            found[name].append(1e3 * (time.perf_counter() - began) / _STEPS)
    for name, times in found.items():
        ratios = sorted(first / each for first, each in zip(next(iter(found.values())), times, strict=True))
        print(
            f"{name:<24}{statistics.median(times):8.2f} ms{statistics.median(ratios):8.2f}x [{ratios[0]:.2f}, {ratios[-1]:.2f}]"
        )


if __name__ == "__main__":
    main()
