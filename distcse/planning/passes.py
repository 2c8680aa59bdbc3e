"""Cost of one pass through a backbone: FLOPs, memory traffic, and seconds on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from distcse.device_defaults import BY_KIND
from distcse.planning.machines import Machine
from distcse.planning.shapes import Shape

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# Elements that a layer reads and writes per token in elementwise operations in eager mode: activations, norms, GELU, dropout,
# residuals and their gradients. A training step moves about 100 h where the inner width is 4 h.
_TRAINING_OF_WIDTH, _TRAINING_OF_INNER, _TRAINING_OF_SCORES = 36, 16, 16
_FORWARD_OF_WIDTH, _FORWARD_OF_INNER, _FORWARD_OF_SCORES = 12, 4.5, 6
_TRAINING_OF_EMBEDDING, _FORWARD_OF_EMBEDDING = 14, 6
# A packed batch scatters queries, keys and values into the padded batch and gathers attention's output, forward and backward.
_PACKING = 16


@dataclass(frozen=True)
class Terms:
    """Seconds of a step by resource."""

    math: float = 0.0
    """Matrix products."""
    traffic: float = 0.0
    """Memory traffic of elementwise operations."""
    host: float = 0.0
    """Launching operations: Python, dispatch, kernel launches."""
    network: float = 0.0
    """Transfers between workers."""
    waiting: float = 0.0
    """Waiting for teachers' lists."""

    def __add__(self, other: Terms) -> Terms:
        return Terms(*(left + right for left, right in zip(self.values, other.values, strict=True)))

    def times(self, factor: float) -> Terms:
        """Return the terms multiplied by a factor."""
        return Terms(*(factor * value for value in self.values))

    @property
    def values(self) -> tuple[float, float, float, float, float]:
        """The terms in the fields' order."""
        return self.math, self.traffic, self.host, self.network, self.waiting

    def seconds(self, kind: str) -> float:
        """Return the total: a GPU overlaps with its host, so the longer counts; on a CPU (`kind` is `cpu`) both add up."""
        device = self.math + self.traffic
        waits = self.network + self.waiting
        return (device + self.host if kind == "cpu" else max(device, self.host)) + waits

    @property
    def binding(self) -> str:
        """Name of the longest term: the bottleneck."""
        names = ("matrix products", "memory traffic", "host and launches", "network", "teachers' lists")
        return names[max(range(len(names)), key=lambda index: self.values[index])]


@dataclass(frozen=True)
class Pass:
    """A forward pass, or a training step's forward and backward pass, over texts of equal length."""

    shape: Shape
    texts: float
    length: float
    """Tokens per text, padding included."""
    training: bool = False
    precision: str = "fp32"
    dropout: bool = False
    unpadded_length: float | None = None
    """Tokens per text without padding, if the batch is packed: only attention then sees padding. None if not packed."""

    @property
    def tokens(self) -> float:
        """Tokens of all texts, padding included."""
        return self.texts * self.length

    @property
    def linear_tokens(self) -> float:
        """Tokens that go through the linear maps; without padding if the batch is packed."""
        return self.texts * (self.unpadded_length or self.length)

    @property
    def linear_flops(self) -> float:
        """FLOPs of the linear maps; a backward pass costs twice the forward pass."""
        return self.linear_tokens * self.shape.linear_flops * (3 if self.training else 1)

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention: scores and the weighted sum of values."""
        return self.tokens * self.shape.attention_flops(self.length) * (3 if self.training else 1)

    @property
    def flops(self) -> float:
        """FLOPs of the pass."""
        return self.linear_flops + self.attention_flops

    @property
    def linear_bytes(self) -> float:
        """Bytes of elementwise operations and of the weights: read forward, read backward, their gradient written."""
        shape, size = self.shape, BYTES[self.precision]
        of_width, of_inner = (
            (_TRAINING_OF_WIDTH, _TRAINING_OF_INNER) if self.training else (_FORWARD_OF_WIDTH, _FORWARD_OF_INNER)
        )
        of_token = (
            of_width * shape.width + of_inner * shape.inner + (_PACKING * shape.width if self.unpadded_length else 0)
        )
        activations = self.linear_tokens * shape.linear_layers * of_token * size
        return activations + shape.layers * shape.layer_parameters * 4 * (3 if self.training else 1)

    @property
    def attention_bytes(self) -> float:
        """Bytes of the L × L scores of every head."""
        of_scores = _TRAINING_OF_SCORES if self.training else _FORWARD_OF_SCORES
        return (
            self.tokens
            * self.shape.attending_layers
            * of_scores
            * self.shape.heads
            * self.length
            * BYTES[self.precision]
        )

    @property
    def embedding_bytes(self) -> float:
        """Bytes of lookup and norm; in training also the dense gradient of the full vocabulary, cleared and written."""
        of_width = _TRAINING_OF_EMBEDDING if self.training else _FORWARD_OF_EMBEDDING
        tokens = self.tokens * of_width * self.shape.width * 4
        return tokens + (2 * 4 * self.shape.embedding_parameters if self.training else 0)

    def terms(self, machine: Machine) -> Terms:
        """Return the seconds on a machine, by resource."""
        factors, _ = machine.factors_of(self.training, self.precision, self.dropout, self.shape.width)
        rate = machine.rate(self.precision)
        math = (factors.linear * self.linear_flops + factors.attention * self.attention_flops) / rate
        linear, attention, embedding = self._bytes(machine.kind)
        moved = factors.linear * linear + factors.attention * attention + factors.embedding * embedding
        host = factors.host * self.shape.layers
        if not host and machine.launch:
            host = machine.launch * self.shape.launches(self.training, self.precision != "fp32")
        return Terms(math=math, traffic=moved / machine.bandwidth, host=host)

    def batched_seconds(self, machine: Machine, batch_tokens: int | None = None) -> float:
        """Return the seconds of a frozen model's pass over all texts, split into batches that the host launches.

        Args:
            machine: The machine.
            batch_tokens: Tokens per batch. Default: the device's.
        """
        batches = max(1.0, self.tokens / (batch_tokens or BY_KIND[machine.kind].frozen_batch_tokens))
        terms = self.terms(machine)
        return Terms(terms.math, terms.traffic, terms.host * batches).seconds(machine.kind)

    def parts(self, rate: float, bandwidth: float, kind: str = "cpu") -> tuple[float, float, float]:
        """Return the seconds of linear maps, attention and embeddings at these rates, without calibration factors.

        Args:
            rate: FLOP/s of matrix products.
            bandwidth: Bytes per second of memory.
            kind: `cpu` or `gpu`. Default: cpu.
        """
        linear, attention, embedding = self._bytes(kind)
        return (
            self.linear_flops / rate + linear / bandwidth,
            self.attention_flops / rate + attention / bandwidth,
            embedding / bandwidth,
        )

    def _bytes(self, kind: str) -> tuple[float, float, float]:
        """Return the bytes of linear maps, attention and embeddings; a GPU's fused attention keeps the scores on its chip."""
        return self.linear_bytes, 0.0 if kind == "gpu" else self.attention_bytes, self.embedding_bytes
