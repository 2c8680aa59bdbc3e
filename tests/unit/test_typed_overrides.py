"""Overrides on the command line: text keys take text as typed, list keys name their form, hub addresses are ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distcse.errors import EvaluationOptionError, InvalidValueError, ModelNotFoundError
from distcse.evaluation import parse_models
from distcse.models import resolve_model
from distcse.recipe import Recipe, read_recipe
from distcse.storage import find_model
from tests.failures import fails_with

BACKBONES = ("student.backbone", "teachers.encoders.0.backbone", "objective.detection.generator")
PROMPT = "teachers.encoders.0.prompt"


def value_of(override: str, *others: str) -> Any:
    recipe = read_recipe("minilm-3layer", [*others, override])
    assert isinstance(recipe, Recipe)
    found: Any = recipe.model_dump()
    for key in override.partition("=")[0].split("."):
        found = found[int(key) if isinstance(found, list) else key]
    return found


@pytest.mark.parametrize(
    "typed",
    [
        *("query: ", "query: {sentence}", "Question ", "- item", "[a", "a # b", "%s", "@x", "`x`", "!x", "*x", "&x"),
        *("123", "1e-5", "2024-01-01", "true", "on", "no", "0x10", "1:30", "{a: 1}", "[1]", "a: b: c", "é: ü"),
        *("'tis the season: ", '"a" or "b"', "it's", "'", '"', "!important", "null ", "~x", "'a' 'b'", "None", ""),
    ],
)
def test_a_text_key_takes_text_as_typed(typed: str) -> None:
    """A quote that does not span the value is text."""
    assert value_of(f"{PROMPT}={typed}") == typed


@pytest.mark.parametrize(
    ("override", "value"),
    [
        (f"{PROMPT}='query: '", "query: "),
        (f'{PROMPT}="a\\tb"', "a\tb"),
        ("corpus.dataset=null", None),
        ("corpus.limit=~", None),
        ("corpus.column=123", "123"),
        *((f"corpus.path={typed}", f"/{typed}") for typed in ("a: b.txt", "1.5", "2024-01-01", "true", "*.txt", "@x")),
        ("corpus.path=[/a.txt, /b.txt]", ["/a.txt", "/b.txt"]),
        ("teachers.encoders.1.backbone=SECOND", "SECOND"),  # the index after the last appends
        ("corpus.path.0=a.txt", "/a.txt"),
    ],
)
def test_a_value_is_read_by_its_keys_type(override: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert value_of(override) == value


@pytest.mark.parametrize(
    ("override", "named"),
    [
        *((f"{key}=", "empty") for key in ("storage.runs", "storage.cache", "corpus.path", "evaluation.data")),
        *((f"corpus.column={typed}", "empty") for typed in (" ", "''")),
        ("corpus.path=[a.txt, '']", "empty"),
        ("training.max_steps=", "training.max_steps=null"),
        *((f"corpus.path={typed}", "['*.txt', '007']") for typed in ("[*.txt]", "[a.txt", "[@a, b]")),
        *((f"student.layers={typed}", f"as a list: [{typed}]") for typed in ("0,2", "0", "0 2")),
    ],
)
def test_a_value_that_is_not_of_its_keys_type_is_refused(override: str, named: str) -> None:
    """An unset shell variable, and a list in another form."""
    with fails_with(InvalidValueError, override.partition("=")[0], named):
        read_recipe("minilm-3layer", [override])


def test_a_recipe_file_never_turns_a_number_into_text(tmp_path: Path) -> None:
    """YAML has changed it already: 007 would become 7, and 'no' False."""
    for written, shown in (("123", "123"), ("2024-01-01", "2024"), ("on", "True")):
        (tmp_path / "recipe.yaml").write_text(f"extends: minilm-3layer\ncorpus: {{column: {written}}}\n")
        with fails_with(InvalidValueError, "corpus.column", shown, "in quotes"):
            read_recipe(str(tmp_path / "recipe.yaml"))


def test_arguments_of_custom_classes_keep_their_types() -> None:
    teacher = '{"backbone": "mine", "class_path": "my_module:Teacher", "kwargs": {}}'
    for typed, expected in (("3", 3), ("0.5", 0.5), ("true", True), ("three", "three")):
        assert value_of(f"teachers.encoders.0.kwargs.prompt={typed}", f"teachers.encoders=[{teacher}]") == expected


# Addresses on the hub


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/intfloat/e5-small",
        "https://www.huggingface.co/intfloat/e5-small/tree/main/?library=sentence-transformers",
        "http://hf.co/intfloat/e5-small#usage",
        "https://huggingface.co/intfloat/e5-small.git",
        "hf://intfloat/e5-small@main",
        "HTTPS://HuggingFace.co/intfloat/e5-small",
    ],
)
def test_an_address_on_the_hub_is_its_id(address: str) -> None:
    name = "intfloat/e5-small"
    assert [value_of(f"{key}={address}") for key in BACKBONES[:2]] == [name, name]
    assert parse_models([address, f"mine={address}"]) == {"e5-small": name, "mine": name}
    for model in (address, find_model(address)):
        with fails_with(ModelNotFoundError, f"'{name}'"):
            resolve_model(model, only_local=True)
    data_set = address.replace("intfloat", "datasets/intfloat")
    if not address.startswith("hf:"):
        assert value_of(f"corpus.dataset={data_set}") == name
    with fails_with(InvalidValueError, "corpus.dataset", "page of a model"):
        read_recipe("minilm-3layer", [f"corpus.dataset={address}"])


@pytest.mark.parametrize("page", ["/tree/v2", "/blob/main/config.json", "/resolve/main/a", "/commit/0a1b2c", "@v2"])
def test_another_revision_is_refused(page: str) -> None:
    for name in ("gpt2", "intfloat/e5-small"):
        with fails_with(InvalidValueError, "student.backbone", "revision", f"write {name}, or"):
            read_recipe("minilm-3layer", [f"student.backbone=https://huggingface.co/{name}{page}"])


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("https://huggingface.co/datasets/sentence-transformers/stsb", "page of a data set"),
        ("https://huggingface.co/", "not the page of a model"),
        ("https://huggingface.co/spaces/mteb/leaderboard", "not the page of a model"),
        ("http://me:secret@host/model", "not the page of a model"),
        ("https://huggingface.co/settings/tokens", "not the page of a model"),
    ],
)
def test_another_page_is_no_model_and_no_address_of_object_storage(address: str, named: str) -> None:
    for key in BACKBONES:
        with fails_with(InvalidValueError, key, named) as raised:
            read_recipe("minilm-3layer", [f"{key}={address}"])
        assert "secret" not in str(raised.value)
    with fails_with(ModelNotFoundError, named):
        resolve_model(find_model(address), only_local=True)
    with fails_with(EvaluationOptionError, named):
        parse_models([address])


def test_an_endpoint_names_its_model_as_it_likes() -> None:
    for name in ("https://huggingface.co/a/b", "hf.co/a/b", "gs://bucket/e5"):
        for kind in ("endpoint: {url: 'http://host/v1'}", "class_path: 'my_module:Teacher'"):
            recipe = read_recipe("minilm-3layer", [f"teachers.encoders=[{{backbone: '{name}', {kind}}}]"])
            assert isinstance(recipe, Recipe) and recipe.teachers.encoders[0].backbone == name


def test_an_address_without_its_beginning_is_named() -> None:
    """Ollama's models have such names, so that a recipe may have them."""
    with fails_with(ModelNotFoundError, "write https://hf.co/intfloat/e5-small"):
        resolve_model("hf.co/intfloat/e5-small")
