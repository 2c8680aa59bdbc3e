"""Malicious files, each a real one: what they would do is done where somebody trusts them, and nowhere here."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from distcse.errors import (
    CheckpointError,
    CorpusNotFoundError,
    DistcseError,
    EmbeddingTableError,
    EncoderError,
    InvalidValueError,
    ModelFormatError,
    ModelNotFoundError,
    PickledWeightsError,
    RecipeError,
    RecipeSyntaxError,
)
from distcse.events import Reporter
from distcse.models import CrossEncoder, Encoder, resolve_model
from distcse.recipe import CorpusSection, Recipe, read_recipe, read_sweep
from distcse.runs.directory import RunDirectory
from distcse.storage import dump_checked_json, open_store
from distcse.text import Corpus
from distcse.training.checkpoint_files import load_model_state, load_weights
from distcse.training.checkpoints import CheckpointStore
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_spec, train
from tests.models import change_json, make_cross_encoder
from tests.pairs import make_mutual_recipe

ROOT = Path(__file__).parents[2]
MakeRecipe = Callable[..., Recipe]


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "the attack came through"


def loaders(model: Path) -> list[Callable[[], object]]:
    return [lambda: Encoder.load(model, pooling="mean"), lambda: CrossEncoder.load(model)]


@pytest.fixture
def model(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a small model, to be spoilt."""
    return shutil.copytree(tiny("bert"), tmp_path / "model")


# -- pickles --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt", "model.pth"])
def test_a_pickle_instead_of_weights_is_refused(model: Path, marker: Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps(Bomb(marker)))
    for load in loaders(model):
        with fails_with(PickledWeightsError, str(model), name):
            load()
    assert not marker.exists()


def test_a_pickle_next_to_weights_is_not_read_and_one_under_their_name_refused(model: Path, marker: Path) -> None:
    cross = make_cross_encoder(model.parent / "cross", model)
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "tokenizer.pkl"):
        (model / name).write_bytes(pickle.dumps(Bomb(marker)))
    assert Encoder.load(model, pooling="mean").encode(["A dog."]).shape == (1, 32)
    for folder, load in ((model, loaders(model)[0]), (cross, loaders(cross)[1])):
        (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(marker)))
        with fails_with(ModelFormatError, str(folder)):
            load()
    assert not marker.exists()


def test_pickled_arrays_in_a_cache_are_never_opened(recipe_with: MakeRecipe, marker: Path) -> None:
    spec, tables = make_spec(recipe_with())
    bomb = np.array([Bomb(marker)], dtype=object)
    np.save(tables[0].directory / "shard-00000.npy", bomb, allow_pickle=True)
    assert tables[0].missing_shards() == [0]
    with fails_with(EmbeddingTableError, "shard-00000.npy"):
        train(spec, tables)
    np.save(spec.corpus.path / "offsets.npy", bomb, allow_pickle=True)
    with pytest.raises(DistcseError):
        Corpus.open(spec.corpus)
    assert not marker.exists()


# -- code that a model brings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "evil"])
def test_a_models_own_code_runs_only_where_it_is_asked_for(model: Path, marker: Path, kind: str) -> None:
    (model / "own.py").write_text(
        f"import os\nos.makedirs({str(marker)!r}, exist_ok=True)\n"
        "from transformers import BertConfig, BertModel, PreTrainedTokenizerFast\n"
        f"class OwnConfig(BertConfig):\n    model_type = {kind!r}\n"
        "class OwnModel(BertModel):\n    config_class = OwnConfig\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    classes = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    change_json(model / "config.json", model_type=kind, auto_map=classes)
    change_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    if kind == "evil":
        for load in loaders(model):
            with pytest.raises(EncoderError):
                load()
    else:  # a family that transformers knows is loaded by transformers' own code
        assert Encoder.load(model, pooling="mean").encode(["A dog."]).shape == (1, 32)
    assert not marker.exists()
    Encoder.load(model, pooling="mean", trust_remote_code=True)
    assert marker.exists()


def test_a_data_set_folder_runs_no_script(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    (folder / "train.jsonl").write_text('{"text": "one"}\n')
    with fails_with(CorpusNotFoundError, str(folder), "scripts are no longer supported"):
        Corpus.prepare(CorpusSection(dataset=str(folder)), open_store(tmp_path / "cache"))
    assert not marker.exists()


# -- YAML -----------------------------------------------------------------------------------------------------------------

YAML_ATTACKS = (
    "!!python/object/apply:os.mkdir ['{marker}']",
    "!!python/object/new:os.mkdir ['{marker}']",
    "!!python/object/apply:subprocess.check_output [[mkdir, '{marker}']]",
    "!!python/name:os.mkdir",
    "!!python/module:os",
    "!!python/object/new:type {{args: [z, !!python/tuple [], {{extend: !!python/name:exec}}]}}",
)


@pytest.mark.parametrize("attack", YAML_ATTACKS)
def test_yaml_builds_no_python_objects(tmp_path: Path, marker: Path, attack: str) -> None:
    text = attack.format(marker=marker)
    file = tmp_path / "recipe.yaml"
    for document in (text, f"student: {text}\n", f"student: {{backbone: {text}}}\n"):
        file.write_text(document)
        with fails_with(RecipeSyntaxError, str(file)):
            read_recipe(str(file))
        with fails_with(RecipeSyntaxError, str(file)):
            read_sweep(str(file))
    with fails_with(InvalidValueError, "name: "):
        read_recipe("quickstart", [f"name={text}"])
    assert not marker.exists()


def test_the_bomb_and_the_first_yaml_attack_are_real_ones(marker: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(marker)))
    marker.rmdir()
    yaml.load(YAML_ATTACKS[0].format(marker=marker), Loader=yaml.UnsafeLoader)
    marker.rmdir()


def test_values_that_multiply_or_nest_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    bomb = "[&a0 {x: 1}" + "".join(f", &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)) + "]"
    for value in (bomb, "[" * 2000, "&a [*a]", "{a: b: c", "*missing"):
        with fails_with(InvalidValueError, "num_servers"):
            read_recipe("quickstart", [f"teachers.num_servers={value}"])
    file = tmp_path / "recipe.yaml"
    file.write_text(f"seed: {bomb}")
    with fails_with(RecipeSyntaxError, str(file), "100,000"):
        read_recipe(str(file))


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').mkdir('{marker}')",
        "().__class__.__bases__[0].__subclasses__()",
        "open('{marker}', 'w')",
        "9**9**9**9",
        "'x' * 10**9",
        "[x for x in range(10**9)]",
    ],
)
def test_a_sweeps_arithmetic_is_no_python(tmp_path: Path, marker: Path, recipe_with: MakeRecipe, formula: str) -> None:
    pytest.importorskip("simpleeval")
    from distcse.tuning.space import Space
    from tests.sweeps import make_sweep

    formulas = {"objective.rank.tau2": {"expression": formula.format(marker=marker)}}
    parameters = {"objective.rank.tau3": {"values": [0.1]}, **formulas}
    with pytest.raises(DistcseError):
        Space(make_sweep(tmp_path, parameters, search={"algorithm": "grid"}), recipe_with()).grid()
    assert not marker.exists()


# -- paths ----------------------------------------------------------------------------------------------------------------

OUTSIDE = ("../outside", "/etc", "a/../../b", "..", "a\\..\\b", "~root", "a\0b", "", ".hidden", "x" * 200)


def test_names_that_become_folders_stay_inside(
    recipe_with: MakeRecipe, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    space = tmp_path / "space.yaml"
    for name in OUTSIDE:
        quoted = json.dumps(name)
        with fails_with(InvalidValueError, "name"):
            recipe_with(f"name={quoted}")
        for key in ("groups.0.name", "name", "pairs.task"):
            with pytest.raises(RecipeError):
                make_mutual_recipe(tmp_path / "groups", {"bert": tiny("bert")}, sentences, f"{key}={quoted}")
        space.write_text(yaml.safe_dump({"name": name, "parameters": {"training.lr": {"values": [0.1]}}}))
        with pytest.raises(RecipeError):
            read_sweep(str(space))


@pytest.mark.parametrize("inside", ["../../../etc", "/etc", "//etc", "model/../../../.."])
def test_a_package_model_stays_in_its_package(inside: str) -> None:
    with fails_with(ModelNotFoundError, inside):
        resolve_model(f"package:numpy/{inside}")


def test_an_index_of_shards_points_nowhere_else(model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "x.safetensors")
    (model / "model.safetensors").rename(model.parent / "secret.safetensors")
    for shard in ("../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", 7, None, [], {}):
        index = {"metadata": {}, "weight_map": {"embeddings.word_embeddings.weight": shard}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        for load in loaders(model):
            with fails_with(ModelFormatError, str(model), repr(shard)):
                load()


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "1_Pooling/../../elsewhere", 7, None])
def test_a_module_lies_in_its_model(model: Path, path: Any) -> None:
    modules = [{"idx": 0, "name": "0", "path": path, "type": "sentence_transformers.models.Pooling"}]
    (model / "modules.json").write_text(json.dumps(modules))
    with fails_with(ModelFormatError, "modules.json"):
        Encoder.load(model)


@pytest.mark.parametrize("files", [{"../weights.safetensors": ""}, {"/etc/passwd": ""}, ["weights.safetensors"], 5])
def test_a_checkpoint_names_only_its_own_files(tmp_path: Path, files: object) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    state = {"step": 1, "scores": [], "finished": False, "updates": 1, "files": files}
    (folder / "trainer_state.json").write_text(dump_checked_json(state))
    for load in (load_model_state, load_weights):
        with fails_with(CheckpointError, str(folder), "trainer_state.json"):
            load(folder)


@pytest.mark.parametrize("pointer", ["../../elsewhere", "/etc", "step-000001/../../..", "", "\0", "step-9" * 100])
def test_a_checkpoint_pointer_names_a_checkpoint(tmp_path: Path, pointer: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest").write_text(pointer)
    found = CheckpointStore(open_store(tmp_path / "run"))
    assert found.latest() is None and found.best() is None and found.restore() is None


def test_what_links_lead_to_is_not_removed(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    """Links in a run's directory to somebody's files: the run does not write or delete through them."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("kept")
    recipe = recipe_with("training.max_steps=2", "evaluation.eval_steps=1", "evaluation.final_suites=[]")
    directory = RunDirectory.create(recipe)
    (directory.path / "checkpoints").mkdir()
    for name in ("step-000007", ".step-000008.1"):
        (directory.path / "checkpoints" / name).symlink_to(victim)
    (directory.path / "model").symlink_to(victim)
    for name in ("evaluation.json", "lease"):
        (directory.path / name).symlink_to(victim / f"made by {name}")
    result = run(recipe, Reporter(), directory)
    assert [file.name for file in victim.iterdir()] == ["precious"]
    assert (victim / "precious").read_text() == "kept"
    assert not result.directory.model.is_symlink() and (result.directory.model / "model.safetensors").is_file()
