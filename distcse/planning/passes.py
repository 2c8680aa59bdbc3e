"""One pass of texts through a backbone: its FLOPs, its traffic, and the seconds they take on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from distcse.planning.machines import Machine
from distcse.planning.shapes import Shape

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# Elements that a layer reads and writes for one token beside its matrix products, in eager mode: a training step moves about
# 100 h of them where the inner width is 4 h (activations, norms, GELU, dropout, residuals, and their gradients).
_TRAINING_OF_WIDTH, _TRAINING_OF_INNER, _TRAINING_OF_SCORES = 36, 16, 16
_FORWARD_OF_WIDTH, _FORWARD_OF_INNER, _FORWARD_OF_SCORES = 12, 4.5, 6
_TRAINING_OF_EMBEDDING, _FORWARD_OF_EMBEDDING = 14, 6
# Queries, keys and values spread over the rectangle and what attention makes of them gathered, there and back.
_PACKING = 16


@dataclass(frozen=True)
class Terms:
    """Seconds by what they go into."""

    math: float = 0.0
    """Matrix products."""
    traffic: float = 0.0
    """Reading and writing memory, element by element."""
    host: float = 0.0
    """Issuing operations: Python, dispatch, kernel launches."""
    network: float = 0.0
    """Between workers."""
    waiting: float = 0.0
    """For lists that the teachers have not served yet."""

    def __add__(self, other: Terms) -> Terms:
        return Terms(*(mine + theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def times(self, factor: float) -> Terms:
        """So many of it."""
        return Terms(*(factor * mine for mine in self.values))

    @property
    def values(self) -> tuple[float, float, float, float, float]:
        """In the fields' order."""
        return self.math, self.traffic, self.host, self.network, self.waiting

    def seconds(self, kind: str) -> float:
        """A CPU does one after the other; a GPU works while the host issues what follows, and the longer of both counts."""
        device = self.math + self.traffic
        beside = self.network + self.waiting
        return (device + self.host if kind == "cpu" else max(device, self.host)) + beside

    @property
    def binding(self) -> str:
        """What takes longest."""
        names = ("matrix products", "memory traffic", "host and launches", "network", "teachers' lists")
        return names[max(range(len(names)), key=lambda place: self.values[place])]


@dataclass(frozen=True)
class Pass:
    """Texts of one length through a backbone, forward or forward and backward."""

    shape: Shape
    texts: float
    length: float
    """Tokens of each, padding included."""
    training: bool = False
    precision: str = "fp32"
    dropout: bool = False
    packed: float | None = None
    """Tokens of each without its padding, where that goes through attention alone."""

    @property
    def tokens(self) -> float:
        """Padding included."""
        return self.texts * self.length

    @property
    def mapped(self) -> float:
        """Tokens that go through the linear maps."""
        return self.texts * (self.packed or self.length)

    @property
    def linear_flops(self) -> float:
        """Backward costs twice the forward."""
        return self.mapped * self.shape.linear_flops * (3 if self.training else 1)

    @property
    def attention_flops(self) -> float:
        """Of the scores and the sum over values."""
        return self.tokens * self.shape.attention_flops(self.length) * (3 if self.training else 1)

    @property
    def flops(self) -> float:
        """Of the whole pass."""
        return self.linear_flops + self.attention_flops

    @property
    def linear_bytes(self) -> float:
        """Activations element by element, and the weights: read forward, read backward, their gradient written."""
        shape, size = self.shape, BYTES[self.precision]
        of_width, of_inner = (
            (_TRAINING_OF_WIDTH, _TRAINING_OF_INNER) if self.training else (_FORWARD_OF_WIDTH, _FORWARD_OF_INNER)
        )
        of_token = of_width * shape.width + of_inner * shape.inner + (_PACKING * shape.width if self.packed else 0)
        activations = self.mapped * shape.linear_layers * of_token * size
        return activations + shape.layers * shape.layer_parameters * 4 * (3 if self.training else 1)

    @property
    def attention_bytes(self) -> float:
        """Of the L × L scores of every head."""
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
        """Looked up, normed; in training the dense gradient of the whole vocabulary, cleared and written."""
        of_width = _TRAINING_OF_EMBEDDING if self.training else _FORWARD_OF_EMBEDDING
        tokens = self.tokens * of_width * self.shape.width * 4
        return tokens + (2 * 4 * self.shape.embedding_parameters if self.training else 0)

    def terms(self, machine: Machine) -> Terms:
        """Seconds on a machine."""
        factors, _ = machine.factors_of(self.training, self.precision, self.dropout, self.shape.width)
        rate = machine.rate(self.precision)
        math = (factors.linear * self.linear_flops + factors.attention * self.attention_flops) / rate
        traffic = (
            factors.linear * self.linear_bytes
            + factors.attention * self.attention_bytes
            + factors.embedding * self.embedding_bytes
        ) / machine.bandwidth
        return Terms(math=math, traffic=traffic, host=factors.host * self.shape.layers)

    def parts(self, rate: float, bandwidth: float) -> tuple[float, float, float]:
        """Seconds at these rates, before any factor: of the linear maps, of attention, of the embeddings."""
        return (
            self.linear_flops / rate + self.linear_bytes / bandwidth,
            self.attention_flops / rate + self.attention_bytes / bandwidth,
            self.embedding_bytes / bandwidth,
        )
