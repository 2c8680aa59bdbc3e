"""PyTorch's `meta` device, whose tensors have no values, in place of a GPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

META = torch.device("meta")


def use_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the device of the engines. Autocast does not support it, so steps run in float32."""
    monkeypatch.setattr("distcse.training.engines.torch_engine.default_device", lambda: "meta")
    known = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda kind, *rest, **more: nullcontext() if kind == "meta" else known(kind, *rest, **more)
    )
