"""`extends: NAME`: a recipe that has the keys of another, and its own in their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from distcse.errors import RecipeError, RecipeNotFoundError, RecipeSyntaxError, UnknownKeyError
from distcse.recipe import load_recipe, read_recipe, recipe_yaml
from distcse.recipe.schema import schema_json


def write(file: Path, text: str) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


def test_a_recipe_extends_a_packaged_one(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mine.yaml",
        "extends: minilm-3layer\nname: mine\ncorpus: {path: text.txt}\nstudent: {layers: [0, 5]}\n",
    )
    base, mine = load_recipe("minilm-3layer"), load_recipe(file, ["training.lr=1e-4"])
    assert (mine.name, mine.student.layers, mine.training.lr) == ("mine", [0, 5], 1e-4)
    assert mine.corpus.path == str(Path.cwd() / "text.txt")
    assert mine.student.backbone == base.student.backbone and mine.teachers == base.teachers
    assert mine.objective == base.objective


def test_paths_are_relative_to_the_file_and_chains_resolve(tmp_path: Path) -> None:
    write(tmp_path / "base" / "first.yaml", "extends: minilm-3layer\ntraining: {epochs: 7, lr: 1e-4}\n")
    write(tmp_path / "base" / "second.yaml", "extends: first.yaml\ntraining: {lr: 2e-4}\nteachers: {num_servers: 2}\n")
    third = write(tmp_path / "third.yaml", "extends: base/second.yaml\nseed: 5\n")
    recipe = load_recipe(third)
    assert (recipe.seed, recipe.training.epochs, recipe.training.lr, recipe.teachers.num_servers) == (5, 7, 2e-4, 2)
    assert recipe.teachers.encoders == load_recipe("minilm-3layer").teachers.encoders


def test_what_is_stored_is_resolved(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", "extends: minilm-3layer\nseed: 5\n")
    stored = recipe_yaml(read_recipe(file))
    assert "extends" not in yaml.safe_load(stored)
    assert read_recipe(write(tmp_path / "stored.yaml", stored)) == read_recipe(file)


def test_a_recipe_of_mutual_distillation_extends_one(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", "extends: minilm-mutual\nevaluation: {data: data}\n")
    assert read_recipe(file) == read_recipe("minilm-mutual", ["evaluation.data=data"])


@pytest.mark.parametrize(
    ("texts", "error", "parts"),
    [
        ({"a": "extends: a.yaml\n"}, RecipeSyntaxError, ["a.yaml → ", "remove extends"]),
        ({"a": "extends: b.yaml\n", "b": "extends: ./a.yaml\n"}, RecipeSyntaxError, ["a.yaml", "b.yaml"]),
        (
            {"a": "extends: [b.yaml, c.yaml]\n"},
            RecipeSyntaxError,
            ["extends is ['b.yaml', 'c.yaml']", "one recipe"],
        ),
        ({"a": "extends: minilm-3layr\n"}, RecipeNotFoundError, ["'minilm-3layr'", "did you mean 'minilm-3layer'?"]),
        (
            {"a": "extends: b.yaml\n", "b": "student: {backbone: x, layrs: 3}\n"},
            UnknownKeyError,
            ["a.yaml", "student.layrs"],
        ),
        ({"a": "extends: minilm-3layer\ntrainig: {lr: 1}\n"}, UnknownKeyError, ["trainig", "'training'"]),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, texts: dict[str, str], error: type[RecipeError], parts: list[str]) -> None:
    for name, text in texts.items():
        write(tmp_path / f"{name}.yaml", text)
    with pytest.raises(error) as raised:
        read_recipe(str(tmp_path / "a.yaml"))
    assert all(part in str(raised.value) for part in parts)


def test_the_schema_admits_partial_sections_with_extends() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(schema_json("recipe"))
    jsonschema.validate({"extends": "quickstart", "student": {"max_length": 16}}, schema)
    for wrong in (
        {"extends": 3},
        {"extends": "quickstart", "student": {"maximum": 16}},
        {"extends": "quickstart", "teachers": {"encoders": [{"alpha": 2}]}},
        {"student": {"max_length": 16}},
        {"seed": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
