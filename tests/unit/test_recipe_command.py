"""The recipe command: packaged recipes listed, shown, copied and validated; the reference page; the schemas for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from distcse.cli.preparation import RECIPE_GROUPS
from distcse.recipe import MutualRecipe, Recipe, Sweep, packaged_recipes, read_recipe
from distcse.recipe.loading import parse_document
from distcse.recipe.schema import reference, schema_documents, schema_json
from distcse.recipe.section import sections_of
from tests.commands import command
from tests.conftest import ROOT

main = command("recipe")


def test_packaged_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    printed = capsys.readouterr().out
    groups = [group.splitlines() for group in printed.split("\n\n")[:-1]]
    rows = [row.split() if row.startswith("    ") else row.split()[:1] for _, *rows in groups for row in rows]
    assert sorted(word for row in rows for word in row if word in packaged_recipes()) == packaged_recipes()
    assert max(map(len, printed.splitlines())) <= 100
    assert [heading for heading, *_ in groups] == list(RECIPE_GROUPS)
    assert rows[:4] == [["quickstart"], ["search"], ["best-small"], ["three-teachers"]] and len(groups[0]) == 5
    assert not [row for row in groups[-1][1:] if "et al." not in row and "no paper" not in row and row[:4] != 4 * " "]
    assert main(["show", "quickstart"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("# A first run without downloads") and yaml.safe_load(shown)["name"] == "quickstart"
    assert main(["show", "quikstart"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'quickstart'?" in error and "distcse recipe ls" in error
    assert len(error) < 150  # it does not list all recipes


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
    space = str(tmp_path / "space.yaml")
    Path(space).write_text("parameters: {objective.rank.tau2: {values: [0.1]}}\n")
    unread = "warning objective.rank.tau3 is set and has no effect: form is list_mle"
    for words, printed in (
        (["quickstart", "seed=7"], ["quickstart is a valid student's recipe"]),
        (
            ["rankcse-listmle-bert-base", "objective.rank.tau3=0.5"],
            ["rankcse-listmle-bert-base is a valid student's recipe", unread],
        ),
        ([space, "search.trials=3"], [f"{space} is a valid search space"]),
    ):
        assert main(["validate", *words]) == 0
        assert capsys.readouterr().out.splitlines() == printed
    for words, named in ((["quickstart", "lr=0.1"], "'training.lr'?"), ([space, "trials=3"], "'search.trials'")):
        assert main(["validate", *words]) == 2 and named in capsys.readouterr().err


def test_the_committed_page_is_what_the_types_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0
    page, command = "docs/reference/recipe.md", "python -m distcse recipe reference"
    assert (ROOT / page).read_text(encoding="utf-8") == capsys.readouterr().out, f"run: {command} > {page}"


def test_every_key_is_described_on_the_page() -> None:
    page = reference()
    keys = {
        f"{path}.{name}": (name, field.description)
        for document in (Recipe, MutualRecipe, Sweep)
        for path, section in sections_of(document)
        for name, field in section.model_fields.items()
    }
    assert not [path for path, (name, text) in keys.items() if not text or f"`{name}`" not in page]


# Schemas


@pytest.mark.parametrize("kind", schema_documents())
def test_the_committed_schemas_are_what_the_types_say(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"docs/schemas/{kind}.schema.json"
    assert main(["schema", kind]) == 0
    text = capsys.readouterr().out
    command = f"python -m distcse recipe schema {kind} > {file}"
    assert (ROOT / file).read_text(encoding="utf-8") == text, f"run: {command}"
    schema = json.loads(text)
    jsonschema.Draft7Validator.check_schema(schema)
    for section in (schema, *schema["definitions"].values()):
        assert section["additionalProperties"] is False and section["description"]
        assert all("description" in key or "$ref" in key for key in section["properties"].values())


def test_every_recipe_and_space_names_its_schema_and_is_valid() -> None:
    recipes, spaces = ROOT / "distcse" / "recipes", ROOT / "tune_spaces"
    kinds = {"\ngroups:": "mutual", "\nfamily:": "family"}
    schemas = {kind: ROOT / "docs" / "schemas" / f"{kind}.schema.json" for kind in schema_documents()}
    validators = {kind: jsonschema.Draft7Validator(json.loads(file.read_text())) for kind, file in schemas.items()}
    for file in (*recipes.glob("*.yaml"), *spaces.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        named = text.splitlines()[0].removeprefix("# yaml-language-server: $schema=")
        kind = "space" if file.parent == spaces else next((kinds[key] for key in kinds if key in text), "recipe")
        assert (file.parent / named).resolve() == schemas[kind], file
        validators[kind].validate(parse_document(text, file.name))


def test_schemas_refuse_what_reading_refuses() -> None:
    schema = json.loads(schema_json("recipe"))
    recipe: dict[str, Any] = {
        "student": {"backbone": "s"},
        "teachers": {"encoders": [{"backbone": "a"}, {"backbone": "b"}]},
    }
    jsonschema.validate({**recipe, "training": {"deepspeed": "zero2.yaml"}}, schema)
    jsonschema.validate({"extends": "quickstart", "student": {"max_length": 16}}, schema)
    for wrong in (
        {**recipe, "objective": {"rank": {"unknown": {}}}},
        {**recipe, "training": {"engine": "unknown"}},
        {**recipe, "training": {"batch_size": 1}},
        {**recipe, "student": {}},
        {"extends": 3},
        {"extends": "quickstart", "student": {"maximum": 16}},
        {"extends": "quickstart", "teachers": {"encoders": [{"alpha": 2}]}},
        {"student": {"max_length": 16}},
        {"seed": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
