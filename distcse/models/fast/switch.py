"""The switch of all shortcuts of this package. It is set on a model when the model is loaded; each shortcut asks it."""

from __future__ import annotations

from torch import nn

_MARK = "distcse_computes_plainly"


def forbid_shortcuts(model: nn.Module) -> None:
    """Compute a loaded model without any shortcut, as `models.fast: off` requires."""
    for module in model.modules():  # also a classifier's body, which is called by itself
        setattr(module, _MARK, True)


def allows_shortcuts(model: nn.Module) -> bool:
    """Return whether a model, or the model that a module wraps, may be computed with shortcuts."""
    return not any(hasattr(module, _MARK) for module in (model, *model.children()))
