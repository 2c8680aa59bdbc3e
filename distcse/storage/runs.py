"""Find the model in a run's folder."""

from __future__ import annotations

from distcse.errors import ModelNotFoundError
from distcse.storage.stores import open_store


def find_model(source: str) -> str:
    """Return the model's folder if `source` is a run, else `source` itself.

    Raises:
        ModelNotFoundError: The run has several models, or none yet.
    """
    if source.startswith(("https://", "http://", "hf://")):  # a model's page on the hub
        return source
    run = open_store(source)
    if not run.fetch("recipe.yaml"):
        return source
    groups = run / "models"
    models = sorted(f"models/{group}/{kind}" for group in groups.list_names() for kind in (groups / group).list_names())
    if models:
        raise ModelNotFoundError(f"{source} has several models; name one of them: {', '.join(models)}")
    if not (run / "model").has_folder():
        raise ModelNotFoundError(f"{source} has no model, because its run is unfinished; wait for it, or --resume it")
    return str((run / "model").path)
