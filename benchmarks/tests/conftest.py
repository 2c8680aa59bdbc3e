"""The fixtures of the project's tests."""

from tests.conftest import cluster, data, labelled, minilm, recipe_with, sentences, tiny

__all__ = ["cluster", "data", "labelled", "minilm", "recipe_with", "sentences", "tiny"]
