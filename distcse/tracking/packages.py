"""What trackers need to be installed, known before a run begins."""

from __future__ import annotations

from importlib.util import find_spec

from distcse.errors import RecipeError
from distcse.recipe import TrackSection

_PACKAGES = {
    "tensorboard": ("tensorboardX", "pip install tensorboardX"),
    "mlflow": ("mlflow", 'pip install "distcse[mlflow]"'),
    "wandb": ("wandb", 'pip install "distcse[wandb]"'),
}


def require_packages(section: TrackSection) -> None:
    """Raise `RecipeError` for a tracker whose package is not here."""
    for name, (package, how) in _PACKAGES.items():
        if getattr(section, name) and find_spec(package) is None:
            raise RecipeError(f"track.{name} needs the package {package}; {how}, or take track.{name} away")
