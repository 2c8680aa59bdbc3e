"""Size and speed of evaluated models, as tables show them."""

from __future__ import annotations

from distcse.evaluation import ModelInfo

SPEED_COLUMNS = ("parameters", "MB", "dimensions", "sentences/s", "one sentence")


def size_and_speed(about: ModelInfo) -> list[str]:
    """Return a model's cells under `SPEED_COLUMNS`; `–` for what is not known."""
    return [
        f"{about.parameters / 1e6:.1f} M" if about.parameters else "–",
        f"{about.size_bytes / 1e6:.1f}" if about.size_bytes else "–",
        str(about.dimensions or "–"),
        "–" if about.sentences_per_s is None else f"{about.sentences_per_s:,.0f}",
        "–" if about.latency_ms is None else f"{about.latency_ms:.1f} ms",
    ]
