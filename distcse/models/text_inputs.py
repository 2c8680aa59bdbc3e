"""Refuse a family that needs more than token ids: an image, a box around each word, or a language."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from distcse.compat.torch import fake_tensors
from distcse.compat.transformers import without_noise
from distcse.errors import UnsupportedModelError
from distcse.gc_paused import gc_paused
from distcse.models.fast.packing import has_known_layers

_LENGTH = 8
_RAISED = (AttributeError, TypeError, ValueError)
"""What families raise for a missing input. PyTorch raises others where it would need a value, and then the run tells."""


def refuse_other_inputs(folder: Path, model_class: Any, config: Any) -> None:
    """Refuse a model that has no token vectors for token ids and a mask alone. No weights are needed.

    A forward pass without values tells it, because the families themselves do not: nearly all of their arguments have
    defaults. Families with shortcuts are known to be text encoders; custom code is not tried, since it may need values.

    Args:
        folder: The model's folder, for the error.
        model_class: Its transformers class (see `model_class`).
        config: Its transformers config.

    Raises:
        UnsupportedModelError: As described.
    """
    if getattr(config, "auto_map", None):
        return
    config_class: Any = type(config)
    problem = _find_problem(model_class, config_class, json.dumps(config.to_dict(), default=str, sort_keys=True))
    if problem is not None:
        raise UnsupportedModelError(
            f"{folder} is a {config.model_type} model, which needs more than a text's tokens ({problem}); use a text encoder"
        )


@cache
def _find_problem(model_class: Any, config_class: Any, config: str) -> str | None:
    with without_noise():
        try:
            with gc_paused(), torch.device("meta"):
                settings = config_class.from_dict(json.loads(config))
                model = model_class.from_config(settings, attn_implementation="eager").eval()
            # DPR's encoders wrap a BERT, and output one vector.
            if model.base_model is model and has_known_layers(model):
                return None
        except Exception:  # of any type; loading the model raises it again, and reports it
            return None
        with fake_tensors(), torch.no_grad():
            model.to_empty(device="cpu")
            ids = torch.zeros(1, _LENGTH, dtype=torch.long)
            try:
                output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
            except _RAISED as error:
                return " ".join(str(error).split())[:200]
            except Exception:  # of any type; see `_RAISED`
                return None
    return None if getattr(output, "last_hidden_state", None) is not None else "it has no last_hidden_state"
