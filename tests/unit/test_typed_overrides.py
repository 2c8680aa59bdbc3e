"""Overrides on the command line: text keys take text as typed, list keys name their form, hub addresses are ids."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from distcse.errors import EvaluationOptionError, InvalidValueError, ModelNotFoundError
from distcse.evaluation import parse_models
from distcse.models import resolve_model
from distcse.recipe import Recipe, read_recipe
from distcse.storage import find_model
from tests.failures import fails_with


def value_of(override: str, *others: str) -> Any:
    recipe = read_recipe("minilm-3layer", [*others, override])
    assert isinstance(recipe, Recipe)
    found: Any = recipe
    for key in override.partition("=")[0].split("."):
        found = (
            found[int(key)]
            if isinstance(found, list)
            else found[key]
            if isinstance(found, dict)
            else getattr(found, key)
        )
    return found


@pytest.mark.parametrize(
    "typed",
    [
        *("query: ", "query: {sentence}", "Question ", "- item", "[a", "a # b", "%s", "@x", "`x`", "!x", "*x", "&x"),
        *("123", "1e-5", "2024-01-01", "true", "on", "no", "0x10", "1:30", "{a: 1}", "[1]", "a: b: c", "é: ü"),
    ],
)
@pytest.mark.parametrize("key", ["teachers.encoders.0.prompt", "corpus.column"])
def test_a_text_key_takes_text_as_typed(key: str, typed: str) -> None:
    assert value_of(f"{key}={typed}") == typed


def test_quotes_are_read_as_yaml_and_null_stays_null() -> None:
    assert value_of("teachers.encoders.0.prompt='query: '") == "query: "
    assert value_of('teachers.encoders.0.prompt="a\\tb"') == "a\tb"
    assert value_of("corpus.dataset=null") is None
    assert value_of("corpus.limit=~") is None
    assert str(value_of("corpus.path=a: b.txt")).endswith("/a: b.txt")
    assert len(value_of("corpus.path=[a.txt, b.txt]")) == 2


@pytest.mark.parametrize("key", ["storage.runs", "storage.cache", "corpus.path", "corpus.column", "evaluation.data"])
@pytest.mark.parametrize("typed", ["", " ", "''"])
def test_an_unset_shell_variable_is_no_value(key: str, typed: str) -> None:
    with fails_with(InvalidValueError, key, "empty"):
        read_recipe("minilm-3layer", [f"{key}={typed}"])


def test_an_empty_value_is_not_null_and_an_empty_prompt_is_one() -> None:
    with fails_with(InvalidValueError, "training.max_steps=", "training.max_steps=null"):
        read_recipe("minilm-3layer", ["training.max_steps="])
    with fails_with(InvalidValueError, "corpus.path", "empty"):
        read_recipe("minilm-3layer", ["corpus.path=[a.txt, '']"])
    assert value_of("teachers.encoders.0.prompt=") == ""


def test_the_index_after_the_last_appends_to_a_list() -> None:
    assert value_of("teachers.encoders.1.backbone=SECOND") == "SECOND"
    assert value_of("corpus.path.0=a.txt").endswith("/a.txt")
    recipe = read_recipe("minilm-3layer", ["teachers.encoders.1.backbone=B", "teachers.encoders.1.alpha=2"])
    assert isinstance(recipe, Recipe)
    assert [teacher.alpha for teacher in recipe.teachers.encoders] == [1, 2]
    with fails_with(InvalidValueError, "teachers.encoders.1.backbone is missing"):
        read_recipe("minilm-3layer", ["teachers.encoders.1.alpha=2"])


def test_the_cache_of_an_empty_variable_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCSE_CACHE", "")
    assert read_recipe("minilm-3layer").storage.cache == str(Path("~/.cache/distcse").expanduser())


@pytest.mark.parametrize(
    "typed", ["'tis the season: ", '"a" or "b"', "it's", "'", '"', "!important", "null ", "~x", "'a' 'b'", "None"]
)
def test_a_quote_that_does_not_span_the_value_is_text(typed: str) -> None:
    assert value_of(f"teachers.encoders.0.prompt={typed}") == typed


@pytest.mark.parametrize(
    "typed", ["123", "1.5", "2024-01-01", "true", "12:30", "*.txt", "{a,b}.txt", "@x", "%a", "`a`"]
)
def test_a_key_for_text_or_a_list_of_texts_takes_text_as_typed(typed: str) -> None:
    assert str(value_of(f"corpus.path={typed}")).endswith(f"/{typed}")


@pytest.mark.parametrize("typed", ["[*.txt]", "[a.txt", "[@a, b]"])
def test_a_list_of_texts_that_is_not_yaml_says_how_to_write_one(typed: str) -> None:
    with fails_with(InvalidValueError, "corpus.path", repr(typed), "['*.txt', '007']"):
        read_recipe("minilm-3layer", [f"corpus.path={typed}"])


@pytest.mark.parametrize(("written", "shown"), [("123", "123"), ("1.5", "1.5"), ("2024-01-01", "2024"), ("on", "True")])
def test_a_recipe_file_never_turns_a_number_into_text(written: str, shown: str, tmp_path: Path) -> None:
    """YAML has changed it already: 007 would become 7, and 'no' False."""
    text = (files("distcse") / "recipes" / "minilm-3layer.yaml").read_text()
    document = yaml.safe_load(text)
    document["corpus"] = {"column": yaml.safe_load(written)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    with fails_with(InvalidValueError, "corpus.column", shown, "in quotes"):
        read_recipe(str(tmp_path / "recipe.yaml"))


def test_arguments_of_custom_classes_keep_their_types() -> None:
    teacher = '{"backbone": "mine", "class_path": "my_module:Teacher", "kwargs": {}}'
    for typed, expected in (("3", 3), ("0.5", 0.5), ("true", True), ("three", "three")):
        assert value_of(f"teachers.encoders.0.kwargs.prompt={typed}", f"teachers.encoders=[{teacher}]") == expected


@pytest.mark.parametrize("typed", ["0,2", "0", "0 2"])
def test_a_list_key_names_the_list_form(typed: str) -> None:
    with fails_with(InvalidValueError, "student.layers", f"as a list: [{typed}]"):
        read_recipe("minilm-3layer", [f"student.layers={typed}"])


@pytest.mark.parametrize(
    "address",
    [
        "https://huggingface.co/intfloat/e5-small",
        "https://huggingface.co/intfloat/e5-small/",
        "https://huggingface.co/intfloat/e5-small/tree/main",
        "https://www.huggingface.co/intfloat/e5-small?library=sentence-transformers",
        "http://hf.co/intfloat/e5-small#usage",
        "https://huggingface.co/intfloat/e5-small.git",
        "hf://intfloat/e5-small",
        "hf://intfloat/e5-small@main",
        "HTTPS://HuggingFace.co/intfloat/e5-small",
    ],
)
def test_an_address_on_the_hub_is_its_id(address: str) -> None:
    assert value_of(f"student.backbone={address}") == "intfloat/e5-small"
    assert value_of(f"teachers.encoders.0.backbone={address}") == "intfloat/e5-small"
    with fails_with(ModelNotFoundError, "'intfloat/e5-small'"):
        resolve_model(address, only_local=True)


def test_a_data_sets_address_is_its_id_and_other_pages_are_refused() -> None:
    assert (
        value_of("corpus.dataset=https://huggingface.co/datasets/sentence-transformers/stsb")
        == "sentence-transformers/stsb"
    )
    for name in ("gpt2", "intfloat/e5-small"):
        for page in ("", "/tree/main", "/tree/main/"):
            assert value_of(f"student.backbone=https://huggingface.co/{name}{page}") == name
        for page in ("/tree/v2", "/blob/main/config.json", "/resolve/main/a", "/commit/0a1b2c", "/discussions", "@v2"):
            with fails_with(InvalidValueError, "student.backbone", "revision", f"write {name}, or"):
                read_recipe("minilm-3layer", [f"student.backbone=https://huggingface.co/{name}{page}"])


def test_a_data_sets_page_is_no_model_and_a_models_page_no_data_set() -> None:
    page = "https://huggingface.co/datasets/sentence-transformers/stsb"
    for key in ("student.backbone", "teachers.encoders.0.backbone", "objective.detection.generator"):
        with fails_with(InvalidValueError, key, "page of a data set"):
            read_recipe("minilm-3layer", [f"{key}={page}"])
    with fails_with(InvalidValueError, "corpus.dataset", "page of a model"):
        read_recipe("minilm-3layer", ["corpus.dataset=https://huggingface.co/intfloat/e5-small"])
    with fails_with(EvaluationOptionError, "page of a data set"):
        parse_models([page])


@pytest.mark.parametrize(
    "address",
    [
        *("https://huggingface.co/", "https://huggingface.co/models", "https://huggingface.co/spaces/mteb/leaderboard"),
        *("https://github.com/intfloat/e5", "http://me:secret@host/model", "https://huggingface.co/settings/tokens"),
    ],
)
def test_another_page_is_no_model_and_no_address_of_object_storage(address: str) -> None:
    for key in ("student.backbone", "teachers.encoders.0.backbone", "objective.detection.generator"):
        with fails_with(InvalidValueError, key, "not the page of a model", "USER/NAME") as raised:
            read_recipe("minilm-3layer", [f"{key}={address}"])
        assert "secret" not in str(raised.value)
    with fails_with(ModelNotFoundError, "not the page of a model"):
        resolve_model(find_model(address), only_local=True)
    with fails_with(EvaluationOptionError, "not the page of a model"):
        parse_models([address])


def test_an_address_without_its_beginning_is_named_and_stays_an_endpoints_model() -> None:
    """Ollama's models have such names."""
    name = "hf.co/intfloat/e5-small"
    with fails_with(ModelNotFoundError, f"write https://{name}"):
        resolve_model(name)
    teacher = f"teachers.encoders=[{{backbone: {name}, endpoint: {{url: 'http://host/v1'}}}}]"
    recipe = read_recipe("minilm-3layer", [teacher])
    assert isinstance(recipe, Recipe) and recipe.teachers.encoders[0].backbone == name


@pytest.mark.parametrize(
    "name", ["https://host/models/e5", "https://huggingface.co/intfloat/e5-small", "gs://bucket/e5"]
)
def test_an_endpoint_names_its_model_as_it_likes(name: str) -> None:
    for kind in ("endpoint: {url: 'http://host/v1'}", "class_path: 'my_module:Teacher'"):
        recipe = read_recipe("minilm-3layer", [f"teachers.encoders=[{{backbone: {name}, {kind}}}]"])
        assert isinstance(recipe, Recipe) and recipe.teachers.encoders[0].backbone == name


def test_commands_take_an_address_on_the_hub_as_its_id() -> None:
    page = "https://huggingface.co/intfloat/e5-small"
    with fails_with(ModelNotFoundError, "'intfloat/e5-small'"):
        resolve_model(find_model(page), only_local=True)
    assert parse_models([f"{page}?library=sentence-transformers", f"mine={page}"]) == {
        "e5-small": "intfloat/e5-small",
        "mine": "intfloat/e5-small",
    }
