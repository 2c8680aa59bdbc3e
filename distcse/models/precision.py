"""Precision of forward passes: autocast, and the data type of frozen weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import nn

from distcse.device import HALF_PRECISIONS
from distcse.errors import EncoderSettingError
from distcse.models.json_files import read_json
from distcse.models.st_format import backbone_folder

_OVERFLOW_FP16 = ("t5", "mt5", "umt5", "gemma")
"""First letters of model types (config.json) whose activations exceed fp16's largest number, 65,504."""


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context: autocast for `bf16` or `fp16`, nothing for `fp32`.

    Raises:
        EncoderSettingError: The precision is another one.
    """
    if precision == "fp32":
        return nullcontext()
    if precision not in HALF_PRECISIONS:
        raise EncoderSettingError(f"precision is {precision!r}; allowed: fp32, {', '.join(HALF_PRECISIONS)}")
    return torch.autocast(device.type, HALF_PRECISIONS[precision])


def frozen_weight_dtype(precision: str, device: str) -> torch.dtype:
    """Return the data type of a frozen model's matrices, for `halve_matrices`.

    On a GPU it is the precision of the forward passes. On a CPU it is float32, which `use_mkldnn_linear` converts.
    """
    return torch.float32 if device == "cpu" else HALF_PRECISIONS.get(precision, torch.float32)


def halve_matrices(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights of a frozen model's linear layers in place, so that autocast does not convert them in every pass.

    Embeddings and norms stay float32: they are a small part of the time, and half of the rounding error. Cosines of
    all-MiniLM-L6-v2 (1,024 sentences, all pairs, autocast as on a GPU, simulated on a CPU) then change by at most 3.3e-4 in
    fp16 and 2.6e-3 in bf16, instead of 5.6e-4 and 4.2e-3. TF32, with the mantissa of fp16, changes them by 3.1e-4.

    Args:
        model: The model.
        dtype: Type of the matrices; float32 changes nothing.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)


def overflows_fp16(folder: Path) -> bool:
    """Return whether the numbers of a model folder's family exceed fp16's range: T5 and Gemma, by their model cards."""
    return str(read_json(backbone_folder(folder) / "config.json").get("model_type", "")).startswith(_OVERFLOW_FP16)
