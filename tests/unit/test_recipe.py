"""Recipes: packaged ones, files, files that extend others, values as typed in a shell, and the message of each mistake."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from distcse.errors import (
    PATHS_BY_NAME,
    DistcseError,
    EvaluationOptionError,
    InvalidValueError,
    ModelNotFoundError,
    RecipeNotFoundError,
    RecipeSyntaxError,
    UnknownKeyError,
)
from distcse.evaluation import parse_models
from distcse.models import resolve_model
from distcse.preflight.inputs import require_inputs
from distcse.recipe import MutualRecipe, Recipe, Sweep, load_recipe, packaged_recipes, read_recipe, recipe_yaml
from distcse.recipe.section import sections_of
from distcse.storage import find_model
from tests.failures import fails_with

PUBLISHED: list[tuple[str, dict[str, list[Any]], dict[str, Any]]] = [
    (  # RankCSE, table 9; ListMLE has no third temperature
        "objective.rank.form training.lr objective.rank.tau2 objective.rank.tau3",
        {
            "rankcse-listnet-bert-base": ["list_net", 3e-5, 0.025, 0.0125],
            "rankcse-listmle-bert-base": ["list_mle", 2e-5, 0.05],
            "rankcse-listnet-bert-large": ["list_net", 3e-5, 0.05, 0.025],
            "rankcse-listmle-bert-large": ["list_mle", 2e-5, 0.05],
            "rankcse-listnet-roberta-base": ["list_net", 2e-5, 0.05, 0.025],
            "rankcse-listmle-roberta-base": ["list_mle", 3e-5, 0.05],
            "rankcse-listnet-roberta-large": ["list_net", 3e-5, 0.025, 0.0125],
            "rankcse-listmle-roberta-large": ["list_mle", 3e-5, 0.025],
        },
        {
            **{"training.batch_size": 128, "training.epochs": 4, "training.warmup": 0.05, "objective.tau1": 0.05},
            **{"teachers.encoders.0.alpha": 1, "teachers.encoders.1.alpha": 2},
            **{"evaluation.eval_steps": 125, "evaluation.final_suites": "with_transfer", "dev": "agreement"},
        },
    ),
    (
        "training.batch_size training.lr",
        {
            "simcse-bert-base": [64, 3e-5],
            "simcse-bert-large": [64, 1e-5],
            "simcse-roberta-base": [512, 1e-5],
            "simcse-roberta-large": [512, 3e-5],
        },
        {
            **{"training.epochs": 1, "training.warmup": 0, "objective.tau1": 0.05, "objective.info_nce.weight": 1},
            **{"objective.rank": None, "objective.consistency": None, "objective.detection": None, "dev": "none"},
        },
    ),
    (
        "training.batch_size training.lr objective.detection.masking_ratio objective.detection.weight "
        "evaluation.final_suites",
        {
            "diffcse-bert-base": [64, 7e-6, 0.3, 0.005, None],
            "diffcse-roberta-base": [64, 1e-5, 0.2, 0.005, None],
            "diffcse-bert-base-transfer": [64, 2e-6, 0.15, 0.05, "with_transfer"],
            "diffcse-roberta-base-transfer": [128, 3e-6, 0.15, 0.05, "with_transfer"],
        },
        {
            **{"training.epochs": 2, "objective.detection.sampling": "argmax", "dev": "none"},
            "student.projection": "batch_norm_mlp",
        },
    ),
    (
        "training.batch_size training.lr objective.combine objective.rank_regression.upper "
        "objective.rank_regression.student_similarity",
        {
            "rankencoder-bert-base": [64, 3e-5, "hinge", 0.8, "same_view"],
            "rankencoder-simcse-bert-base": [64, 3e-5, "sum", 0.9999, "cross_view"],
            "rankencoder-promptbert-bert-base": [256, 1e-5, "hinge", 0.8, "cross_view"],
            "rankencoder-sncse-bert-base": [128, 1e-5, "sum", 0.9999, "cross_view"],
        },
        {
            **{"objective.rank_regression.weight": 0.05, "objective.rank_regression.lower": 0.5, "seed": 61507},
            **{"teachers.encoders.0.similarity": "rank", "teachers.encoders.0.num_references": 100_000},
        },
    ),
]
"""What papers give: the keys that differ, their values by recipe, and the values that all these recipes have."""


def write(file: Path, text: str) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


def test_a_packaged_recipe_has_the_name_of_its_file() -> None:
    assert [read_recipe(name).name for name in packaged_recipes()] == packaged_recipes()


@pytest.mark.parametrize(("keys", "recipes", "common"), PUBLISHED, ids=lambda value: None)
def test_packaged_recipes_have_the_papers_values(
    keys: str, recipes: dict[str, list[Any]], common: dict[str, Any]
) -> None:
    for name, values in recipes.items():
        recipe = load_recipe(name)
        document = {**recipe.model_dump(), "dev": recipe.dev_score}
        for path, value in {**dict(zip(keys.split(), values, strict=False)), **common}.items():
            found: Any = document
            for key in path.split("."):
                found = found[int(key) if isinstance(found, list) else key]
            assert found == value, f"{name}: {path}"
        if "rankencoder" not in name and "diffcse" not in name:
            assert load_recipe(name, ["evaluation.data=x"]).dev_score == "stsb"


def test_trans_encoders_binary_tasks() -> None:
    for kind, size, task in product(("bert", "roberta", "mutual"), ("base", "large"), ("qqp", "qnli", "mrpc")):
        recipe = read_recipe(f"trans-encoder-{kind}-{size}-{task}", ["evaluation.data=x"])
        assert isinstance(recipe, MutualRecipe)
        assert [group.name for group in recipe.groups] == (["bert", "roberta"] if kind == "mutual" else [kind])
        assert all(size in group.backbone and size in str(group.cross_backbone) for group in recipe.groups)
        assert (recipe.bi.batch_size, recipe.bi.epochs) == (128 if size == "base" else 64, 15)
        assert (recipe.cross.epochs, recipe.mutual.cycles, recipe.cross.both_orders) == (3, 5, task != "qnli")
        assert (recipe.pairs.task, recipe.evaluation.dev, recipe.evaluation.final_suites) == (task, task, ["pairs"])


MINE = "pairs={mine: {corpus: {path: x.txt}}}"


@pytest.mark.parametrize(
    ("name", "overrides", "use"),
    [
        ("minilm-3layer", ["evaluation.dev=stsb"], "evaluation.dev"),
        ("minilm-3layer", ["evaluation.final_suites=[agreement, sts]"], "evaluation.final_suites"),
        ("minilm-3layer", ["evaluation.rank_inference={}"], "evaluation.rank_inference"),
        ("minilm-3layer", ["corpus.exclude_evaluation=true"], "corpus.exclude_evaluation"),
        ("trans-encoder-bert-base", ["evaluation.dev=none"], "pairs.task"),
        ("minilm-mutual", [MINE], "evaluation.dev"),
        (
            "minilm-mutual",
            [MINE, "pairs.mine.corpus.exclude_evaluation=true", "evaluation.dev=none"],
            "pairs.mine.corpus.exclude_evaluation",
        ),
    ],
)
def test_labelled_sets_are_needed_by_a_run_and_not_by_the_recipe(name: str, overrides: list[str], use: str) -> None:
    recipe = read_recipe(name, overrides)
    assert use in str(recipe.inputs.labelled_for)
    with fails_with(InvalidValueError, use, "write evaluation.data: FOLDER"):
        require_inputs(recipe)


def test_overrides_reach_lists_null_and_new_sections() -> None:
    overrides = ["teachers.encoders.1.alpha=5", "objective.consistency=null", "objective.rank.eps=1e-7"]
    recipe = load_recipe("rankcse-listnet-bert-base", [*overrides, "student.layers=[0, 2]"])
    assert recipe.teachers.encoders[1].alpha == 5 and recipe.objective.consistency is None
    assert recipe.objective.rank is not None and recipe.objective.rank.eps == 1e-7
    assert recipe.student.layers == [0, 2]


SHORT: dict[tuple[str, ...], list[str]] = {
    ("corpus=a.txt", "teacher=T", "student=S"): [
        "corpus.path=a.txt", "teachers.encoders.0.backbone=T", "student.backbone=S",
    ],
    ("corpus=['a.txt', 'b.txt']", "teachers=[A, B]"): [
        "corpus.path=['a.txt', 'b.txt']", "teachers.encoders.0.backbone=A", "teachers.encoders.1={backbone: B}",
    ],
    ("teachers=A",): ["teachers.encoders.0.backbone=A"],
    ("corpus={path: a.txt}", "teachers={encoders: [{backbone: A}]}"): [
        "corpus.path=a.txt", "teachers.encoders=[{backbone: A}]",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("short", "long"), SHORT.items(), ids=lambda value: " ".join(value))
def test_text_teachers_and_student_have_short_names(short: tuple[str, ...], long: list[str]) -> None:
    """A teacher by a short name has the settings of the one in its place."""
    assert read_recipe("best-small", short) == read_recipe("best-small", long)


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTCSE_CACHE", "here")
    (tmp_path / "model").mkdir()
    generator = load_recipe("diffcse-bert-base", ["objective.detection.generator=model"]).objective.detection
    assert generator is not None and generator.generator == str(tmp_path / "model")
    recipe = load_recipe("minilm-3layer", ["corpus.path=a.txt", "student.backbone=model"])
    assert recipe.corpus.path == str(tmp_path / "a.txt") and recipe.student.backbone == str(tmp_path / "model")
    assert recipe.storage.cache == str(tmp_path / "here")
    assert load_recipe("minilm-3layer", ["storage.cache=there"]).storage.cache == str(tmp_path / "there")
    monkeypatch.setenv("DISTCSE_CACHE", "")
    assert read_recipe("minilm-3layer").storage.cache == str(Path("~/.cache/distcse").expanduser())


# Files that extend others


def test_a_file_extends_a_chain_and_is_stored_resolved(tmp_path: Path) -> None:
    """Names of recipes are relative to the file, paths of texts to the current directory."""
    write(tmp_path / "base" / "first.yaml", "extends: minilm-3layer\ntraining: {epochs: 7, lr: 1e-4}\n")
    write(tmp_path / "base" / "second.yaml", "extends: first.yaml\ntraining: {lr: 2e-4}\nteachers: {num_servers: 2}\n")
    third = write(
        tmp_path / "third.yaml",
        "extends: base/second.yaml\nname: mine\nseed: 5\ncorpus: {path: text.txt}\nstudent: {layers: [0, 5]}\n",
    )
    base, recipe = load_recipe("minilm-3layer"), load_recipe(third, ["training.batch_size=64"])
    training = recipe.training
    assert (recipe.seed, training.epochs, training.lr, training.batch_size) == (5, 7, 2e-4, 64)
    assert (recipe.name, recipe.student.layers, recipe.teachers.num_servers) == ("mine", [0, 5], 2)
    assert recipe.corpus.path == str(Path.cwd() / "text.txt")
    assert recipe.student.backbone == base.student.backbone and recipe.teachers.encoders == base.teachers.encoders
    assert recipe.objective == base.objective
    stored = recipe_yaml(recipe)
    assert "extends" not in yaml.safe_load(stored)
    assert read_recipe(write(tmp_path / "stored.yaml", stored)) == recipe


@pytest.mark.parametrize(
    ("a", "b", "kind", "named"),
    [
        ("student: [", "", RecipeSyntaxError, ["a.yaml is not YAML"]),
        ("- 1", "", RecipeSyntaxError, ["a.yaml is not a recipe", "found list"]),
        ("seed: 1\nseed: 2\nstudent: {backbone: x}", "", RecipeSyntaxError, ["a.yaml, line 2: key 'seed'", "line 1"]),
        ("seed: 1", "", InvalidValueError, ["a.yaml", "student is missing"]),
        ("extends: a.yaml", "", RecipeSyntaxError, ["a.yaml → ", "remove extends"]),
        ("extends: b.yaml", "extends: ./a.yaml", RecipeSyntaxError, ["a.yaml", "b.yaml"]),
        ("extends: [b.yaml, c]", "", RecipeSyntaxError, ["extends is ['b.yaml', 'c']", "one recipe"]),
        ("extends: minilm-3layr", "", RecipeNotFoundError, ["'minilm-3layr'", "did you mean 'minilm-3layer'?"]),
        ("extends: b.yaml", "student: {backbone: x, layrs: 3}", UnknownKeyError, ["a.yaml", "student.layrs"]),
        ("extends: minilm-3layer\ntrainig: {lr: 1}", "", UnknownKeyError, ["trainig", "'training'"]),
        # YAML turns text without quotes into other types: 007 would become 7
        ("extends: minilm-3layer\ncorpus: {column: 123}", "", InvalidValueError, ["corpus.column", "123", "in quotes"]),
        ("extends: minilm-3layer\ncorpus: {column: 2024-01-01}", "", InvalidValueError, ["2024", "in quotes"]),
        ("extends: minilm-3layer\ncorpus: {column: on}", "", InvalidValueError, ["True", "in quotes"]),
    ],
)
def test_a_mistake_in_a_file_is_named(
    tmp_path: Path, a: str, b: str, kind: type[DistcseError], named: list[str]
) -> None:
    write(tmp_path / "b.yaml", b)
    with fails_with(kind, *named):
        read_recipe(write(tmp_path / "a.yaml", a))


# Overrides

UNKNOWN_KEYS = {
    "objective.rank.tau_2=3": "unknown key objective.rank.tau_2 (value 3); did you mean 'tau2'?",
    "teachers.encoders.0.alhpa=3": "unknown key teachers.encoders.0.alhpa (value 3); did you mean 'alpha'?",
    "teachers.encoders.0.endpoint={url: 'http://x', api_key: sk-hush}": (
        "unknown key teachers.encoders.0.endpoint.api_key; "
    ),
    "loggers.passwd=hush": "unknown key loggers.passwd; ",
    "trainig.lr=3": "unknown key trainig (value {'lr': 3}); did you mean 'training'?",
    "tau2=0.1": "unknown key tau2 (value 0.1); valid keys: name, ",
    "learning_rate=3": "unknown key learning_rate (value 3); did you mean 'training.lr'?",
    "training.learning_rate=3": "unknown key training.learning_rate (value 3); did you mean 'lr'?",
    "teachers.encoders.0.model=X": "did you mean 'backbone'?",
}
INVALID_VALUES = {
    "corpus=null": "corpus is None; expected a mapping",
    "teachers=[1]": "teachers.encoders.0.backbone is 1; expected a valid string",
    "teachers.encoders=[X]": "write teachers.encoders.0.backbone=X",
    "teachers.encoders=X": "write teachers.encoders.0.backbone=X",
    "training=fast": "write its keys, such as training.batch_size",
    "training.lr=fast": "training.lr is 'fast'; expected a valid number",
    "training.lr=-1": "training.lr is -1; expected greater than 0",
    "training.lr=2": "training.lr is 2; expected less than or equal to 1",
    "seed=1.5": "seed is 1.5; expected a",
    "corpus.limit=0": "corpus.limit is 0; expected greater than or equal to 1",
    "student.layers=[0, a]": "student.layers.1 is 'a'; expected a",
    "student.layers=[4, 2]": "layers must be ascending and distinct",
    "student.pooling=avg": "student.pooling is 'avg'; expected 'cls'",
    "objective.rank.form=listnet": "did you mean 'list_net'?",
    "training.workers=3": "workers is 3, which does not divide batch_size 64; allowed: 1, 2, 4",
    "training.min_workers=2": "min_workers is 2, and workers 0",
    "training={engine: torch, zero_stage: 1}": "zero_stage needs DeepSpeed; write engine: deepspeed, or zero_stage: 0",
    "training={engine: deepspeed, deepspeed: {gradient_clipping: 1.0}}": "deepspeed sets gradient_clipping",
    "training={engine: deepspeed, deepspeed: {zero_optimization: {stage: 3}}}": "zero_optimization.stage, which zero_stage",
    "training={engine: deepspeed, deepspeed: {zero_optimization: {offload_param: {}}}}": "offload_param",
    "training={engine: deepspeed, deepspeed: {zero_optimization: 3}}": "deepspeed.zero_optimization is 3",
    "training.deepspeed={steps_per_print: 1}": "write engine: deepspeed, or deepspeed: null",
    "training.dropout_rng_streams=3": "dropout_rng_streams is 3, which does not divide batch_size 64",
    "training.gradient_accumulation=7": "evaluation.eval_steps is 90, which is no multiple",
    "corpus.sources.0.dataset=x": (
        "gives path and dataset, but a corpus has one source; keep one, and set the other to null"
    ),
    "teachers.encoders=[]": "objective.regression needs teachers; add teachers.encoders, or write objective.regression: null",
    "teachers.encoders.0.endpoint={url: 'host:8080/v1'}": (
        "'host:8080/v1' is no address; write one such as http://host:8080/v1"
    ),
    **{
        f"teachers.encoders.0.endpoint={{url: '{url}'}}": "teachers.encoders.0.endpoint.url"
        for url in (
            *("https://me:hush@host/v1", "https://host/v1?api-key=hush", "https://host/v1?hush"),
            *("https://host/v1?auth=hush", "me:hush@host/v1"),
        )
    },
    "teachers.encoders.0.endpoint={url: 'http://host/v1', api_key_env: sk-hush}": (
        "teachers.encoders.0.endpoint.api_key_env"
    ),
    **{
        f"loggers.mlflow={{uri: '{uri}'}}": "MLFLOW_TRACKING_USERNAME"
        for uri in ("https://me:hush@host/", "postgresql://host/runs?password=hush")
    },
    "objective.regression=null": "objective has no term",
    "objective.regression.weight=0": "objective has no term",
    "evaluation.final_suites=sts": (
        "evaluation.final_suites is 'sts'; expected a valid list or 'with_transfer'; as a list: [sts]"
    ),
    "evaluation.num_heldout=2": "agreement needs teachers and evaluation.num_heldout of at least 3",
    "name=a/b": "allowed: letters, digits",
    "teachers.encoders.1.alpha=3": "teachers.encoders.1.backbone is missing",
    "teachers.encoders.2.alpha=3": "'2' is no place in a list of 1; allowed: 0 to 1",
    "seed.x=3": "seed is 42, which has no keys inside",
    # an unset shell variable, and a list in another form
    **{f"{key}=": f"{key} … empty" for key in ("storage.runs", "storage.cache", "corpus.path", "evaluation.data")},
    **{f"corpus.column={typed}": "corpus.column … empty" for typed in (" ", "''")},
    "corpus.path=[a.txt, '']": "corpus.path … empty",
    "training.max_steps=": "training.max_steps=null",
    **{f"corpus.path={typed}": "corpus.path … ['*.txt', '007']" for typed in ("[*.txt]", "[a.txt", "[@a, b]")},
    **{f"student.layers={typed}": f"student.layers … as a list: [{typed}]" for typed in ("0,2", "0", "0 2")},
    "lr": "is not of the form key.path=value, such as training.lr=2e-5",
    "seed=[1": "is not a YAML value",
}


@pytest.mark.parametrize(
    ("kind", "override", "named"),
    [
        *((UnknownKeyError, *row) for row in UNKNOWN_KEYS.items()),
        *((InvalidValueError, *row) for row in INVALID_VALUES.items()),
    ],
)
def test_a_mistake_is_one_error_with_key_value_and_way_out(kind: type[DistcseError], override: str, named: str) -> None:
    with fails_with(kind, *named.split(" … ")) as raised:
        load_recipe("quickstart", ["seed=42", override])
    assert "\n" not in str(raised.value) and "hush" not in str(raised.value)


def test_several_mistakes_are_one_error() -> None:
    with fails_with(InvalidValueError, "3 errors", "training.lr is 'x'", "seed is 'y'", "unknown key training.lrr"):
        load_recipe("quickstart", ["training.lr=x", "seed=y", "training.lrr=1"])


def test_what_newcomers_write_has_a_path_that_exists() -> None:
    known = {
        f"{prefix}{path}.{key}".lstrip(".")  # a key of the root has no path before it
        for prefix, document in (("", Recipe), ("sweep.", Sweep))
        for path, section in sections_of(document)
        for key in section.model_fields
    }
    assert {path.replace(".0.", ".*.") for path in PATHS_BY_NAME.values()} <= known


BACKBONES = ("student.backbone", "teachers.encoders.0.backbone", "objective.detection.generator")
PROMPT, KWARG = "teachers.encoders.0.prompt", "teachers.encoders.0.kwargs.prompt"


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
        *((f"{KWARG}={value}", value) for value in (3, 0.5, "three")),
        (f"{KWARG}=true", True),
    ],
)
def test_a_value_is_read_by_its_keys_type(override: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    custom = "teachers.encoders=[{backbone: mine, class_path: 'my_module:Teacher', kwargs: {}}]"
    assert value_of(override, *([custom] if KWARG in override else [])) == value


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
