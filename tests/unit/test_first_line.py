"""The first line of every command: before the libraries that take seconds to import, a line says what is being loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from distcse.cli.shared import COMMANDS
from distcse.recipe import recipe_yaml
from tests.commands import run_command
from tests.jobs import make_recipe

LOADS = 75
"""Exit status of a command that imports a slow library."""
UNTIL_LOADING = f"""
import json, os, sys, tempfile
from importlib.machinery import ModuleSpec

class Stopper:
    def find_spec(self, name, path=None, target=None):
        slow = ("torch", "transformers", "ray", "scipy", "sklearn", "datasets", "pandas", "matplotlib", "optuna")
        return ModuleSpec(name, self) if name in slow else None

    def create_module(self, spec):
        os._exit({LOADS})  # leaves buffered output behind, which a user would not see either

    def exec_module(self, module): ...

sys.meta_path.insert(0, Stopper())
from distcse.cli import main
import distcse.recipe
results = []
for words in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as shown:
        if (child := os.fork()) == 0:
            os.dup2(shown.fileno(), 1), os.dup2(shown.fileno(), 2)
            sys.exit(main(words))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shown.seek(0)
        results.append((status, shown.read()))
json.dump(results, sys.stdout)
"""
CALLS = """
train RECIPE | train RECIPE --dry-run | train RECIPE training.workers=1 | train --resume RUN | train --rerun RUN
tune RECIPE --space SPACE | tune RECIPE --space SPACE --dry-run | tune RECIPE --space SPACE --print-space | tune --resume RUN
embed RECIPE | embed RECIPE --dry-run | embed RECIPE --compare | embed RECIPE --fit-weights
pairs sts_unlabelled --data DATA | plan RECIPE | plan RECIPE --cluster 8xA100-40G
recipe ls | recipe show quickstart | recipe validate RECIPE | recipe schema recipe | recipe reference
doctor | doctor RECIPE | env | env --constraints | evaluate MODEL | evaluate MODEL --dry-run
rank MODEL --corpus TEXT --out OUT | export MODEL --onnx | push MODEL --to me/student --dry-run | completion bash
"""
WITHOUT_PYTORCH = {"recipe", "push", "completion"}


def test_a_line_comes_before_slow_imports(
    tiny: Callable[..., Path], sentences: list[str], labelled: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, f"evaluation.data={labelled}")
    (tmp_path / "mine.yaml").write_text(recipe_yaml(recipe))
    places = {
        "RECIPE": tmp_path / "mine.yaml",
        "SPACE": "rankcse-listnet",
        "RUN": tmp_path,
        "MODEL": tiny("bert"),
        "TEXT": tmp_path / "corpus.txt",
        "OUT": tmp_path / "out",
        "DATA": labelled,
    }
    calls = [call.split() for call in CALLS.strip().replace("\n", " | ").split(" | ")]
    assert {call[0] for call in calls} == {*COMMANDS}
    words = [[str(places.get(word, word)) for word in call] for call in calls]
    done = run_command([sys.executable, "-c", UNTIL_LOADING, json.dumps(words)])
    assert done.returncode == 0, done.stderr
    for call, (status, shown) in zip(calls, json.loads(done.stdout), strict=True):
        assert status in (0, LOADS), (call, shown)
        if status == LOADS:
            assert call[0] not in WITHOUT_PYTORCH, call
            assert "loading   PyTorch" in shown, (call, shown)
