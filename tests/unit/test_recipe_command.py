"""The recipe command: packaged recipes listed, shown, copied and validated; the schemas for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from distcse.errors import RecipeError
from distcse.recipe import packaged_recipes, read_recipe
from distcse.recipe.loading import parse_document
from distcse.recipe.schema import reference, schema_documents, schema_json
from tests.commands import command
from tests.conftest import ROOT

main = command("recipe")

TEACHERS = [{"backbone": "a"}, {"backbone": "b"}]
RECIPE: dict[str, Any] = {"student": {"backbone": "s"}, "teachers": {"encoders": TEACHERS}}


def test_hostile_overrides_cost_nothing() -> None:
    bomb = "[&a0 {x: 1}" + "".join(f", &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)) + "]"
    for value in (bomb, "[" * 5000, "&a [*a]", "{a: b: c", "*missing"):
        with pytest.raises(RecipeError, match="num_servers"):
            read_recipe("quickstart", [f"teachers.num_servers={value}"])


def test_packaged_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == packaged_recipes()
    assert not [line for line in lines if not line.endswith((".", "=FILE"))]
    assert main(["show", "quickstart"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# The embedded default") and yaml.safe_load(shown)["name"] == "quickstart"
    assert main(["show", "quikstart"]) == 2
    error = capsys.readouterr().err
    assert (
        "did you mean 'quickstart'?" in error and "distcse recipe ls" in error and len(error) < 150
    )  # not all of them


def test_a_packaged_recipe_is_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert main(["cp", "quickstart", str(file)]) == 0
    assert capsys.readouterr().out == f"written to {file}\ntrain   distcse train {file}\n"
    assert read_recipe(str(file)) == read_recipe("quickstart") and "yaml-language-server" not in file.read_text()
    before = file.read_text()
    assert main(["cp", "minilm-3layer", str(file)]) == 2 and f"{file} exists" in capsys.readouterr().err
    assert file.read_text() == before
    assert main(["cp", "quikstart", str(tmp_path / "no.yaml")]) == 2 and not (tmp_path / "no.yaml").exists()


def test_recipes_and_spaces_are_validated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("parameters: {objective.rank.tau2: {values: [0.1]}}\n")
    assert main(["validate", "quickstart", "seed=7"]) == 0
    assert capsys.readouterr().out == "quickstart is a valid student's recipe\n"
    assert main(["validate", str(space), "search.trials=3"]) == 0
    assert capsys.readouterr().out == f"{space} is a valid search space\n"
    assert main(["validate", "quickstart", "lr=0.1"]) == 2
    assert "did you mean 'training.lr'?" in capsys.readouterr().err
    assert main(["validate", str(space), "trials=3"]) == 2 and "'search.trials'" in capsys.readouterr().err


def test_reference_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0 and capsys.readouterr().out == reference()
    assert main([]) == 0
    alone = capsys.readouterr().out
    assert all(f"\n    {name}" in alone for name in ("ls", "show", "cp", "validate", "reference", "schema"))


# Schemas


@pytest.mark.parametrize("kind", schema_documents())
def test_the_committed_schemas_are_what_the_types_say(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "docs" / "schemas" / f"{kind}.schema.json"
    behind = (
        f"{file} is behind the types; run: python -m distcse recipe schema {kind} > docs/schemas/{kind}.schema.json"
    )
    assert file.read_text(encoding="utf-8") == schema_json(kind), behind
    assert main(["schema", kind]) == 0 and capsys.readouterr().out == schema_json(kind)
    schema = json.loads(schema_json(kind))
    jsonschema.Draft7Validator.check_schema(schema)
    for section in (schema, *schema["definitions"].values()):
        assert section["additionalProperties"] is False and section["description"]
        assert not [
            name for name, key in section["properties"].items() if "description" not in key and "$ref" not in key
        ]


RECIPES, SPACES = ROOT / "distcse" / "recipes", ROOT / "tune_spaces"


@pytest.mark.parametrize(
    "file", [*sorted(RECIPES.glob("*.yaml")), *sorted(SPACES.glob("*.yaml"))], ids=lambda file: file.stem
)
def test_every_recipe_and_space_names_its_schema_and_is_valid(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    named = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    schema = (file.parent / named).resolve()
    keys = {"\ngroups:": "mutual", "\nfamily:": "family"}
    kind = "space" if file.parent == SPACES else next((kind for key, kind in keys.items() if key in text), "recipe")
    assert schema == ROOT / "docs" / "schemas" / f"{kind}.schema.json"
    jsonschema.validate(parse_document(text, file.name), json.loads(schema.read_text()))


def test_schemas_refuse_what_reading_refuses() -> None:
    schema = json.loads(schema_json("recipe"))
    jsonschema.validate({**RECIPE, "training": {"deepspeed": "zero2.yaml"}}, schema)
    for wrong in (
        {"objective": {"rank": {"unknown": {}}}},
        {"training": {"engine": "unknown"}},
        {"training": {"batch_size": 1}},
        {"student": {}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**RECIPE, **wrong}, schema)
