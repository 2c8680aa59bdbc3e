"""The model in a run's folder, for all that read models."""

from __future__ import annotations

from distcse.errors import ModelNotFoundError
from distcse.storage.folders import is_stored
from distcse.storage.places import resolve_path
from distcse.storage.single import fetch, names


def model_of(source: str) -> str:
    """What is named, or the model in it where it is a run's folder.

    Raises:
        EncoderError: A run with several models, or with none yet.
    """
    run = resolve_path(source)
    if not fetch(run / "recipe.yaml"):
        return source
    several = sorted(
        f"models/{group}/{kind}" for group in names(run / "models") for kind in names(run / "models" / group)
    )
    if several:
        raise ModelNotFoundError(f"{source} holds several models; name one of them: {', '.join(several)}")
    if not is_stored(run / "model"):
        raise ModelNotFoundError(f"{source} has no model: its run has not come to an end; wait for it, or --resume it")
    return str(run / "model")
