"""The fixtures of the project's tests."""

from tests.conftest import data, labelled, minilm, recipe_with, sentences, tiny

__all__ = ["data", "labelled", "minilm", "recipe_with", "sentences", "tiny"]
