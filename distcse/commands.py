"""The table of commands: what `distcse --help` shows, and which module runs each."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

GROUPS = {
    "train": {
        "train": "train a student from a recipe; resume or repeat a run",
        "tune": "search a recipe's parameters",
        "embed": "embed a corpus with a recipe's teachers, or compare the teachers",
        "pairs": "write a task's pairs for mutual distillation",
    },
    "look first": {
        "recipe": "list, copy and validate recipes; print their schemas",
        "plan": "estimate a run's time and memory",
        "doctor": "check this machine, its cluster and a recipe's files",
        "env": "print versions, devices, memory and Ray, for a bug report",
    },
    "use a model": {
        "evaluate": "evaluate models side by side",
        "rank": "store a model with references, to score pairs by cosine and ranks",
        "export": "export a model to ONNX",
        "push": "upload a model to the Hugging Face hub",
    },
    "shell": {
        "completion": "print the completion of bash, zsh or fish",
    },
}
"""Command -> what it does, by heading."""
COMMANDS = {name: about for commands in GROUPS.values() for name, about in commands.items()}
USUAL_CALLS = {
    "distcse recipe cp best-small my-recipe.yaml": "a recipe to start from",
    "distcse train my-recipe.yaml corpus.path=text.txt": "train; key.path=value overrides any setting",
    "distcse evaluate student=RUN teacher=FOLDER --data data": "compare models",
}
"""The most usual calls -> what they are for."""
_PACKAGE_COMMANDS = ("recipe",)


def import_command(name: str) -> ModuleType:
    """Import the module that runs a command: it has `build_parser` and `main`."""
    return import_module(f"distcse.{name}.__main__" if name in _PACKAGE_COMMANDS else f"distcse.{name}")
