"""Renamed keys: the error for a recipe of version 0.1, what `distcse recipe migrate` makes of it, and the schemas for editors."""

from __future__ import annotations

import copy
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import distcse.__main__
from distcse.errors import RecipeNotFoundError, RecipeSyntaxError, RenamedKeyError, StorageWriteError
from distcse.recipe import MutualRecipe, Recipe, packaged_recipes, read_recipe, read_sweep, recipe_yaml, with_values
from distcse.recipe.__main__ import main
from distcse.recipe.json_schema import schema_documents, schema_json
from distcse.recipe.key_paths import sections_of
from distcse.recipe.loading import parse_document
from distcse.recipe.migration import migrate_file, migrate_text
from distcse.recipe.reference import reference
from distcse.recipe.renamed_keys import RENAMED_KEYS, RENAMED_SWEEP_KEYS, RENAMED_VALUES
from distcse.runs.directory import RunDirectory
from distcse.storage import add_checksum_line
from tests.conftest import ROOT
from tests.failures import fails_with

Document = dict[str, Any]

TEACHERS = [{"backbone": "a"}, {"backbone": "b"}]
RECIPE: Document = {"student": {"backbone": "s"}, "teachers": {"encoders": TEACHERS}}
MUTUAL: Document = {
    "pairs": {"mine": {"corpus": {"path": "pairs.txt"}}},
    "groups": [{"name": "one", "backbone": "s"}],
    "evaluation": {"data": "sets"},
}
SPACE: Document = {"parameters": {"training.lr": {"values": [1e-5]}, "objective.tau1": {"values": [0.1]}}}

CUSTOM = {"class_path": "mine:Loss"}
ENDPOINT = {"url": "http://host/v1"}
EXAMPLES: dict[str, tuple[Any, Document]] = {
    "objective.custom": ({"mine": CUSTOM}, {}),
    "objective.custom.*.class_path": ("mine:Loss", {}),
    "objective.custom.*.kwargs": ({"code": 1, "knobs": 2}, {"objective.custom.*.class_path": "mine:Loss"}),
    "objective.info_nce.false_negatives.threshold": (0.8, {}),
    "objective.rank.queue": ({"num_batches": 4}, {}),
    "objective.rank.queue.num_batches": (4, {}),
    "objective.rank.queue.num_anchors": (64, {}),
    "objective.rank.queue.refresh_steps": (4, {}),
    "student.init_weight_mix": (0.2, {}),
    "student.embedding_size": (8, {}),
    "student.num_layers": (3, {"student.layers": "auto"}),
    "teachers.encoders.*.class_path": ("mine:Teacher", {}),
    "teachers.encoders.*.kwargs": ({"space": "rank"}, {"teachers.encoders.*.class_path": "mine:Teacher"}),
    "teachers.encoders.*.similarity": ("rank", {}),
    "teachers.encoders.*.num_references": (500, {}),
    "teachers.encoders.*.rank_method": ("histogram", {}),
    "teachers.encoders.*.endpoint.api_key_env": ("MY_KEY", {"teachers.encoders.*.endpoint.url": ENDPOINT["url"]}),
    "teachers.encoders.*.endpoint.batch_size": (32, {"teachers.encoders.*.endpoint.url": ENDPOINT["url"]}),
    "teachers.encoders.*.endpoint.timeout_s": (5.0, {"teachers.encoders.*.endpoint.url": ENDPOINT["url"]}),
    "teachers.embedding_workers": (2, {}),
    "teachers.gpus_per_actor": (0.5, {}),
    "teachers.num_servers": (2, {}),
    "teachers.node_labels": ({"nodes": "teachers"}, {}),
    "teachers.heartbeat_timeout_s": (90.0, {}),
    "teachers.prefetch_steps": (8, {}),
    "teachers.rank_noise_group": (4, {}),
    "teachers.disagreement_scale": (0.5, {}),
    "training.neighbor_batching": ({"per_anchor": 2}, {}),
    "training.neighbor_batching.per_anchor": (2, {}),
    "training.neighbor_batching.min_rank": (2, {}),
    "training.neighbor_batching.max_rank": (8, {}),
    "training.neighbor_batching.anchor_fraction": (0.5, {}),
    "training.min_workers": (1, {}),
    "training.node_labels": ({"nodes": "students"}, {}),
    "training.dropout_rng_streams": (4, {}),
    "training.grad_cache_chunk": (32, {}),
    "evaluation.num_heldout": (64, {}),
    "evaluation.eval_steps": (50, {}),
    "evaluation.async_eval": ({"cpus": 2.0}, {}),
    "evaluation.final_suites": (["agreement"], {}),
    "pairs.mine.num_neighbors": (5, {}),
    "groups.*.node_labels": ({"nodes": "one"}, {}),
    "mutual.initialization": ("sequential", {}),
    "loggers": ({"tensorboard": True}, {}),
}
"""Of each new path: a value that is not the default, and what it needs besides."""
SWEEP_EXAMPLES: dict[str, Any] = {
    "parameters": SPACE["parameters"],
    "parameters.*.expression": "lr * 2",
    "search.n_startup_trials": 3,
    "schedule.grace_period": 0.5,
    "schedule.reduction_factor": 4,
    "final_runs": {"seeds": [7]},
    "loggers": ["mlflow"],
}
IN_MUTUAL = ("pairs", "groups", "mutual", "bi", "cross")


def place_of(document: Document, path: str) -> list[str | int]:
    """A table's path in a document: `*` is the first entry of a list, or a name."""
    node: Any = document
    keys: list[str | int] = []
    for key in path.split("."):
        keys.append((0 if isinstance(node, list) else "mine") if key == "*" else key)
        node = node[keys[-1]] if isinstance(node, list) or (isinstance(node, dict) and keys[-1] in node) else None
    return keys


def set_at(document: Document, keys: list[str | int], value: Any) -> None:
    *parents, last = keys
    node: Any = document
    for key in parents:
        node = node[key] if isinstance(node, list) else node.setdefault(key, {})
    node[last] = value


def documents(old: str, new: str) -> tuple[Document, Document, str, str]:
    """A document with an old key, the same with the new one, and both paths."""
    value, extras = EXAMPLES[new]
    base = MUTUAL if new.split(".")[0] in IN_MUTUAL else RECIPE
    before, after = copy.deepcopy(base), copy.deepcopy(base)
    old_keys, new_keys = place_of(before, old), place_of(after, new)
    for path, extra in extras.items():
        parent = len(path.split(".")) - 1
        set_at(after, place_of(after, path), extra)
        set_at(before, [*old_keys[:parent], path.split(".")[-1]], extra)
    set_at(before, old_keys, value)
    set_at(after, new_keys, value)
    return before, after, ".".join(map(str, old_keys)), ".".join(map(str, new_keys))


def written(file: Path, document: Document) -> str:
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return str(file)


def test_there_is_an_example_of_every_entry() -> None:
    assert EXAMPLES.keys() == set(RENAMED_KEYS.values()) and len(RENAMED_KEYS) == len(EXAMPLES)
    assert SWEEP_EXAMPLES.keys() == set(RENAMED_SWEEP_KEYS.values())


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_an_old_key_is_refused_and_migrated(old: str, tmp_path: Path) -> None:
    before, after, old_path, new_path = documents(old, RENAMED_KEYS[old])
    file, expected = written(tmp_path / "old.yaml", before), written(tmp_path / "new.yaml", after)
    with pytest.raises(RenamedKeyError) as refused:
        read_recipe(file)
    assert f"{old_path} is now {new_path}" in str(refused.value)
    assert f"; run: distcse recipe migrate {file}" in str(refused.value)
    assert migrate_file(file)
    assert yaml.safe_load(Path(file).read_text()) == after
    assert read_recipe(file) == read_recipe(expected)
    migrated = Path(file).read_bytes()
    assert migrate_file(file) == [] and Path(file).read_bytes() == migrated


@pytest.mark.parametrize("old", RENAMED_KEYS)
def test_the_error_of_an_old_override_has_the_new_one(old: str, tmp_path: Path) -> None:
    new = RENAMED_KEYS[old]
    _, after, old_path, new_path = documents(old, new)
    file = written(tmp_path / "new.yaml", after)
    value = json.dumps(EXAMPLES[new][0])
    with pytest.raises(RenamedKeyError) as refused:
        read_recipe(file, [f"{old_path}={value}"])
    shown = "…" if new.endswith("api_key_env") else value
    assert str(refused.value) == f"override {old_path}: {old_path} is now {new_path}; write {new_path}={shown}"
    assert read_recipe(file, [f"{new_path}={value}"]) == read_recipe(file)


@pytest.mark.parametrize("path", RENAMED_VALUES)
def test_an_old_value_is_refused_and_migrated(path: str, tmp_path: Path) -> None:
    for old, new in RENAMED_VALUES[path].items():
        base = MUTUAL if path.split(".")[0] in IN_MUTUAL else RECIPE
        before, after = copy.deepcopy(base), copy.deepcopy(base)
        set_at(before, [*path.split(".")], old)
        set_at(after, [*path.split(".")], new)
        file, expected = written(tmp_path / "old.yaml", before), written(tmp_path / "new.yaml", after)
        with fails_with(RenamedKeyError, f"{path}: {old}", f"{path}: {new}", "(line ", "distcse recipe migrate"):
            read_recipe(file)
        with fails_with(RenamedKeyError, f"{path}: {old}", f"{path}: {new}", f"{path}={new}"):
            read_recipe(expected, [f"{path}={old}"])
        migrate_file(file)
        assert yaml.safe_load(Path(file).read_text()) == after and read_recipe(file) == read_recipe(expected)


@pytest.mark.parametrize("old", RENAMED_SWEEP_KEYS)
def test_an_old_key_of_a_search_space_is_refused_and_migrated(old: str, tmp_path: Path) -> None:
    new = RENAMED_SWEEP_KEYS[old]
    before, after = copy.deepcopy(SPACE), copy.deepcopy(SPACE)
    old_keys, new_keys = old.split("."), new.split(".")
    if "*" in new:
        old_keys, new_keys = (
            [root, "objective.tau1", last] for root, last in (("knobs", "equals"), ("parameters", "expression"))
        )
        before = {"knobs": {**SPACE["parameters"], "objective.tau1": {}}}
        after["parameters"]["objective.tau1"] = {}
    elif old == "knobs":
        del before["parameters"]
    set_at(before, [*old_keys], SWEEP_EXAMPLES[new])
    set_at(after, [*new_keys], SWEEP_EXAMPLES[new])
    file, expected = written(tmp_path / "old.yaml", before), written(tmp_path / "new.yaml", after)
    with pytest.raises(RenamedKeyError) as refused:
        read_sweep(file)
    assert f"{'.'.join(old_keys)} is now {'.'.join(new_keys)} (line " in str(refused.value)
    migrate_file(file)
    assert yaml.safe_load(Path(file).read_text()) == after and read_sweep(file) == read_sweep(expected)
    assert migrate_file(file) == []


def test_no_new_key_has_an_old_name() -> None:
    """An old name that means something else now would be renamed in new recipes."""
    now = {
        f"{path}.{name}".removeprefix(".")
        for kind in (Recipe, MutualRecipe)
        for path, section in sections_of(kind)
        for name in section.model_fields
    }
    assert now >= set(RENAMED_KEYS.values()) and now.isdisjoint(RENAMED_KEYS)
    for name in packaged_recipes():
        text = (ROOT / "distcse" / "recipes" / f"{name}.yaml").read_text()
        assert migrate_text(text, name) == (text, [])
    for file in (ROOT / "tune_spaces").glob("*.yaml"):
        assert migrate_text(file.read_text(), file.name) == (file.read_text(), [])


def old_and_new(text: str) -> tuple[str, str]:
    """Return the document before and after its migration; it has the old and the new name as `<depth|num_layers>`."""
    old, new = (re.sub(r"<(.+?)\|(.+?)>", group, text) for group in (r"\1", r"\2"))
    return old, new


OLD, NEW = old_and_new("""\
# My recipe. The word memory stays in a comment: objective.rank.memory.

name: 'mine'
student: {backbone: some/model,   <depth|num_layers>: 3, layers: auto}   # odd spacing
teachers:
    encoders:
    -   backbone: "some/model"
        "<space|similarity>": rank        # quoted key
        <references|num_references>:   500
        alpha: 1e-3
    - {backbone: other/model, '<ranks|rank_method>': histogram, <code|class_path>: null}
    <nodes|node_labels>: &labels {role: teachers}
objective:
  info_nce: null
  consistency: ~
  rank:
    # The queue.
    <memory|queue>:
      <batches|num_batches>: 0x4


      ? <landmarks|num_anchors>
      : 64
training:
  engine: '<plain|torch>'
  <nodes|node_labels>: *labels
evaluation: {
  <every|eval_steps>: 50,  # often
  <final|final_suites>: [agreement],
}
""")
OLD_SPACE, NEW_SPACE = old_and_new("""\
# What is searched: chunk and memory.
<knobs|parameters>:
  training.<chunk|grad_cache_chunk>: {values: [16, 32]}          # chunk
  objective.rank.<memory|queue>.<batches|num_batches>: {integers: [1, 8]}
  "teachers.encoders.*.alpha": {simplex: true}
  objective.rank.tau2: {<equals|expression>: 0.1 / <batches|num_batches>}
  objective.rank.tau3: {<equals|expression>: \
"objective.rank.<memory|queue>.<batches|num_batches> * 2 + <chunk|grad_cache_chunk> / 1e-3"}
  training.engine: {values: [<plain|torch>, 'deepspeed']}
search: {algorithm: random, <startup|n_startup_trials>: 4}
""")


@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (OLD_SPACE, NEW_SPACE)])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_all_but_the_names_stays_byte_for_byte(old: str, new: str, newline: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(old.replace("\n", newline).encode())
    migrate_file(str(file))
    assert file.read_bytes() == new.replace("\n", newline).encode()
    read_sweep(str(file)) if old == OLD_SPACE else read_recipe(str(file))


def test_a_short_name_in_an_expression_becomes_a_path_where_it_is_ambiguous_now() -> None:
    old = (
        "knobs:\n  training.neighbours.farthest: {values: [8]}\n  a.max_rank: {values: [1]}\n  b: {equals: farthest}\n"
    )
    migrated, _ = migrate_text(old, "space.yaml")
    assert migrated.endswith("  b: {expression: training.neighbor_batching.max_rank}\n")


def test_all_old_keys_and_overrides_are_in_one_error(tmp_path: Path) -> None:
    file = tmp_path / "my recipe.yaml"
    file.write_text("student: {backbone: s}\nobjective: {rank: {memory: {batches: 8}}}\nevaluation:\n  every: 50\n")
    with pytest.raises(RenamedKeyError) as refused:
        read_recipe(str(file), ["training.chunk=8", "objective.rank.memory={batches: 4, landmarks: 2}", "seed=1"])
    assert str(refused.value) == (
        f"recipe {file} has 3 renamed keys; run: distcse recipe migrate '{file}'\n"
        "  objective.rank.memory is now objective.rank.queue (line 2)\n"
        "  objective.rank.memory.batches is now objective.rank.queue.num_batches (line 2, value 8)\n"
        "  evaluation.every is now evaluation.eval_steps (line 4, value 50)\n"
        "override training.chunk: training.chunk is now training.grad_cache_chunk; write training.grad_cache_chunk=8\n"
        "override objective.rank.memory: objective.rank.memory is now objective.rank.queue, objective.rank.memory.batches is "
        "now objective.rank.queue.num_batches, objective.rank.memory.landmarks is now objective.rank.queue.num_anchors; "
        "write objective.rank.queue={num_batches: 4, num_anchors: 2}"
    )
    assert refused.value.code == "DCSE-R04"


def test_the_error_of_a_search_spaces_override_has_its_prefix(tmp_path: Path) -> None:
    file = written(tmp_path / "space.yaml", SPACE)
    with fails_with(RenamedKeyError, "sweep.search.n_startup_trials=3"):
        read_sweep(file, ["search.startup=3"], override_prefix="sweep.")
    with fails_with(RenamedKeyError, "parameters={training.grad_cache_chunk: {values: [8]}}"):
        read_sweep(file, ["knobs={training.chunk: {values: [8]}}"])


def test_values_by_an_old_path_are_refused() -> None:
    with fails_with(RenamedKeyError, "training.chunk ", "training.grad_cache_chunk"):
        with_values(Recipe.model_validate(RECIPE), {"training.chunk": 8})
    with fails_with(RenamedKeyError, "queue.num_batches", "training.engine: plain", "training.engine: torch"):
        with_values(Recipe.model_validate(RECIPE), {"objective.rank.queue": {"batches": 8}, "training.engine": "plain"})


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    teacher = {"backbone": "t", "endpoint": {**ENDPOINT, "key_variable": "sk-123"}}
    file = written(tmp_path / "r.yaml", {**RECIPE, "teachers": {"encoders": [teacher]}})
    with pytest.raises(RenamedKeyError) as refused:
        read_recipe(file, ["teachers.encoders.0.endpoint.key_variable=sk-456"])
    assert "api_key_env" in str(refused.value) and "sk-" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "objective:\n  rank:\n    memory: {}\n    queue: {}\n",
            ("objective.rank.memory (line 3)", "objective.rank.queue", "(line 4)"),
        ),
        (
            "knobs:\n  training.chunk: {values: [8]}\n  training.grad_cache_chunk: {values: [8]}\n",
            ("(line 2)", "parameters.training.grad_cache_chunk", "(line 3)"),
        ),
        ("teachers: &t {nodes: {a: b}}\nstorage: *t\n", ("teachers.nodes", "alias")),
    ],
)
def test_what_is_ambiguous_is_refused_and_nothing_is_written(text: str, named: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with fails_with(RenamedKeyError, *named):
        migrate_file(str(file))
    with fails_with(RenamedKeyError, *named):
        read_sweep(str(file)) if text.startswith("knobs") else read_recipe(str(file))
    assert file.read_text() == text and [*tmp_path.iterdir()] == [file]


def test_hostile_overrides_cost_nothing(tmp_path: Path) -> None:
    bomb = "[&a0 {x: 1}" + "".join(f", &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)) + "]"
    file = written(tmp_path / "r.yaml", RECIPE)
    for value in (bomb, "[" * 5000, "&a [*a]", "{a: b: c", "*missing"):
        with fails_with(RenamedKeyError, "teachers.num_servers="):
            read_recipe(file, [f"teachers.servers={value}"])


def test_what_is_no_document_is_refused(tmp_path: Path) -> None:
    with fails_with(RecipeNotFoundError, "nothing.yaml"):
        migrate_file(str(tmp_path / "nothing.yaml"))
    for content in (b"a: [", b"- a", b"", "ä: 1".encode("latin-1")):
        (tmp_path / "r.yaml").write_bytes(content)
        with pytest.raises(RecipeSyntaxError):
            migrate_file(str(tmp_path / "r.yaml"))


def test_the_file_keeps_its_mode_and_its_link(tmp_path: Path) -> None:
    file, link = tmp_path / "r.yaml", tmp_path / "link.yaml"
    file.write_text(OLD)
    file.chmod(0o640)
    link.symlink_to(file)
    migrate_file(str(link))
    assert link.is_symlink() and file.read_text() == NEW and stat.S_IMODE(os.stat(file).st_mode) == 0o640


def test_output_leaves_the_file_alone(tmp_path: Path) -> None:
    file, output = tmp_path / "r.yaml", tmp_path / "new.yaml"
    file.write_text(OLD)
    migrate_file(str(file), str(output))
    assert (file.read_text(), output.read_text()) == (OLD, NEW)
    migrate_file(str(output), str(tmp_path / "copy.yaml"))
    assert (tmp_path / "copy.yaml").read_text() == NEW
    with pytest.raises(StorageWriteError):
        migrate_file(str(file), str(tmp_path / "missing" / "new.yaml"))


def test_the_error_of_an_old_run_names_the_file_to_migrate(tmp_path: Path) -> None:
    """A stored recipe ends in its checksum, which is made anew."""
    stored = tmp_path / "recipe.yaml"
    now = recipe_yaml(Recipe.model_validate(RECIPE))
    stored.write_text(add_checksum_line(now.replace("\nloggers:", "\ntrack:").replace("eval_steps:", "every:")))
    with pytest.raises(
        RenamedKeyError, match=f"recipe {stored} has 2 renamed keys; run: distcse recipe migrate {stored}\n"
    ):
        RunDirectory.reopen(tmp_path, [])
    migrate_file(str(stored))
    assert stored.read_text() == add_checksum_line(now)
    _, recipe = RunDirectory.reopen(tmp_path, [])
    assert recipe == read_recipe(str(stored))


# The command


def test_migrate_prints_what_it_renamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = tmp_path / "r.yaml", tmp_path / "new.yaml"
    file.write_text("student:\n  start_share: 0.1\ntraining: {engine: plain}\n")
    assert distcse.__main__.main(["recipe", "migrate", str(file), "--output", str(output)]) == 0
    renamed = "line 2: student.start_share → student.init_weight_mix\nline 3: training.engine: plain → training.engine: torch\n"
    assert capsys.readouterr().out == f"{renamed}written to {output}\n"
    assert main(["migrate", str(file)]) == 0 and capsys.readouterr().out == renamed
    assert main(["migrate", str(file)]) == 0 and capsys.readouterr().out == "nothing to rename\n"
    assert main(["migrate", str(tmp_path / "no.yaml")]) == 2
    assert capsys.readouterr().err.startswith("distcse: [DCSE-R01] no file ")


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
        "did you mean 'quickstart'?" in error and "distcse.recipe ls" in error and len(error) < 150
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
    assert main(["validate", "quickstart", "tau2=0.1"]) == 2
    assert "did you mean 'objective.rank.tau2'?" in capsys.readouterr().err
    assert main(["validate", str(space), "trials=3"]) == 2 and "'search.trials'" in capsys.readouterr().err


def test_reference_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference"]) == 0 and capsys.readouterr().out == reference()
    assert main([]) == 0
    alone = capsys.readouterr().out
    assert all(f"\n    {name}" in alone for name in ("ls", "show", "cp", "validate", "reference", "schema", "migrate"))


# Schemas


@pytest.mark.parametrize("kind", schema_documents())
def test_the_committed_schemas_are_what_the_types_say(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "docs" / "schemas" / f"{kind}.schema.json"
    behind = (
        f"{file} is behind the types; run: python -m distcse.recipe schema {kind} > docs/schemas/{kind}.schema.json"
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
        {"objective": {"rank": {"memory": {}}}},
        {"training": {"engine": "plain"}},
        {"training": {"batch_size": 1}},
        {"student": {}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**RECIPE, **wrong}, schema)
