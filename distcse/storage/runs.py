"""Find the model in a run's folder."""

from __future__ import annotations

from distcse.errors import ModelNotFoundError
from distcse.storage.folders import is_stored
from distcse.storage.places import resolve_path
from distcse.storage.single import fetch, list_names


def find_model(source: str) -> str:
    """Return the model's folder if `source` is a run, else `source` itself.

    Raises:
        ModelNotFoundError: The run has several models, or none yet.
    """
    run = resolve_path(source)
    if not fetch(run / "recipe.yaml"):
        return source
    models = sorted(
        f"models/{group}/{kind}" for group in list_names(run / "models") for kind in list_names(run / "models" / group)
    )
    if models:
        raise ModelNotFoundError(f"{source} has several models; name one of them: {', '.join(models)}")
    if not is_stored(run / "model"):
        raise ModelNotFoundError(f"{source} has no model, because its run is unfinished; wait for it, or --resume it")
    return str(run / "model")
