"""The likeliest mistakes, made with the real commands: one message names the problem, its place and what to type."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from distcse import cli, run
from distcse.checks import require
from distcse.devices.process import refuse_launchers
from distcse.errors import ArgumentError, EncoderSettingError
from distcse.preflight.models import model_questions
from distcse.recipe import read_recipe, recipe_yaml
from distcse.runs.directory import write_recipe
from distcse.storage import open_store
from tests.endpoints import Reply, open_endpoint
from tests.failures import fails_with
from tests.jobs import make_recipe

pytestmark = pytest.mark.usefixtures("without_ray")


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> SimpleNamespace:
    """A folder with a recipe that works, and everything that is needed to break it."""
    folder = tmp_path_factory.mktemp("mistakes")
    recipe = make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences, "training.max_steps=4")
    for name, text in {
        "works.yaml": recipe_yaml(recipe),
        "not.yaml": "student: {backbone: x\n",
        "text.jsonl": json.dumps({"body": "A sentence."}) + "\n",
        "few.txt": "One.\nTwo.\nThree.\n",
        "file": "in the way",
        "adapter/adapter_config.json": "{}",
        "tau2.yaml": "parameters: {objective.rank.tau2: {values: [0.1]}}\n",
        "tua2.yaml": "parameters: {objective.rank.tua2: {values: [0.1]}}\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    pickled = shutil.copytree(tiny("bert"), folder / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    (run := folder / "runs" / "begun").mkdir(parents=True)
    write_recipe(open_store(run), recipe)
    return SimpleNamespace(folder=folder, recipe=folder / "works.yaml", tiny=tiny("bert"), labelled=labelled, run=run)


R = "{p.recipe}"
MISTAKES: list[tuple[str, list[str], int, list[str]]] = [
    # the recipe and how it is named
    ("train", [], 2, ["name a recipe or a YAML file", "minilm-3layer"]),
    ("train", ["quikstart"], 2, ["no recipe or file 'quikstart'", "did you mean 'quickstart'?"]),
    ("train", [R, "trianing.lr=2e-5"], 2, ["DCSE-R03", "unknown key trianing", "did you mean 'training'?"]),
    ("train", ["{p.folder}/not.yaml"], 2, ["not.yaml is not YAML", "line"]),
    # the text
    ("train", [R, "corpus.path=/nowhere/text.txt"], 1, ["corpus file /nowhere/text.txt does not exist"]),
    ("train", [R, "corpus.path=null"], 1, ["DCSE-C01", "corpus.path=FILE"]),
    ("train", [R, "corpus.path=package:no_such_package/text.txt"], 1, ["'no_such_package' is not installed"]),
    ("train", [R, "corpus.path={p.folder}/empty"], 1, ["is a folder; write corpus.path=", "/*.txt"]),
    ("train", [R, "corpus.path={p.folder}/text.jsonl"], 1, ["text.jsonl, line 1", "'text'", "body", "corpus.column"]),
    ("train", [R, "corpus.path={p.folder}/few.txt"], 1, ["the corpus has 3 rows", "evaluation.num_heldout"]),
    ("train", [R, "evaluation.data={p.folder}/empty"], 1, ["DCSE-E01", "sts/stsb/dev.tsv.gz"]),
    # models
    ("train", [R, "student.backbone=./no-such-model"], 1, ["no model folder", "no-such-model"]),
    (
        "train",
        [R, "teachers.encoders.0.backbone=BAAI/bge-base-en-v1.5"],
        1,
        ["DCSE-M01", "'BAAI/bge-base-en-v1.5'", "HF_HUB_OFFLINE", "local folder"],
    ),
    ("train", [R, "teachers.encoders.0.pooling=null"], 2, ["DCSE-M09", "set pooling: cls, mean"]),
    ("train", [R, "student.backbone={p.folder}/pickled"], 1, ["DCSE-M04", "pytorch_model.bin but no safetensors"]),
    ("train", [R, "student.backbone=package:no_such/model"], 1, ["package 'no_such' is not installed", "pip install no_such"]),
    ("train", [R, "student.layers=[0, 7]"], 2, ["DCSE-M09", "layers", "7", "has 3 layers; allowed: 0 to 2"]),
    ("train", [R, "student.max_length=4096"], 2, ["max_length is 4096", "at most"]),
    ("train", [R, "teachers.encoders.0.max_length=4096"], 2, ["max_length is 4096", "at most"]),
    ("train", [R, "student.backbone={p.run}"], 1, ["DCSE-M01", "/model"]),
    ("train", [R, "student.backbone={p.folder}/adapter"], 1, ["adapter", "merge"]),
    ("train", [R, "student.backbone={p.tiny}/model.safetensors"], 1, ["DCSE-M01", "model.safetensors"]),
    # folders, and resuming
    ("train", [R, "storage.runs={p.folder}/file/runs"], 1, ["cannot write in", "set storage.runs to a folder"]),
    ("train", [R, "storage.cache={p.folder}/file"], 1, ["cannot write in", "set storage.cache to a folder"]),
    ("train", ["--resume", "{p.folder}/empty"], 1, ["is not a run directory", "recipe.yaml", "--resume"]),
    ("train", ["--resume", "{p.run}", "training.lr=1e-4"], 2, ["training.lr cannot change in a resumed run", "start a new run"]),
    ("train", ["--resume", "{p.run}", "evaluation.final_suites=[sts]"], 2, ["evaluation.final_suites", "evaluation.data"]),
    ("train", [R, "--resume", "{p.run}"], 2, ["--resume takes the recipe from the run's folder", "take", "away"]),
    # the other doors
    ("tune", [R], 2, ["name a recipe and a space: distcse tune RECIPE --space SPACE"]),
    ("tune", [R, "--space", "{p.folder}/tua2.yaml"], 2, ["objective.rank.tua2", "did you mean 'tau2'?"]),
    ("tune", [R, "--space", "{p.folder}/tau2.yaml", "student.backbone=nobody/no-such-model"], 1, ["DCSE-M01"]),
    ("tune", [R, "--space", "{p.folder}/tau2.yaml", "evaluation.dev=none"], 2, ["evaluation.dev is none"]),
    ("evaluate", ["{p.tiny}", "--suite", "stss", "--data", "{p.labelled}"], 1, ["DCSE-E04", "'stss'", "sts, transfer"]),
    ("evaluate", ["{p.tiny}", "--pooling", "mean"], 1, ["DCSE-E04", "--data"]),
    ("evaluate", ["{p.folder}/empty", "--data", "{p.labelled}"], 1, ["DCSE-M02", "empty", "model.safetensors"]),
    ("embed", [R, "--compare"], 1, ["two teachers"]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "arguments", "status", "named"), MISTAKES, ids=lambda value: None)
def test_one_message_and_no_run(
    command: str,
    arguments: list[str],
    status: int,
    named: list[str],
    place: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No folder of a run, and nothing in the cache."""
    given = [argument.format(p=place) for argument in arguments]
    if given[:1] == [str(place.recipe)] and "--resume" not in given:
        given[1:1] = [f"storage.runs={tmp_path}/runs", f"storage.cache={tmp_path}/cache"]
    assert cli.main([command, *given, "--quiet"]) == status
    assert_one_line(capsys, *named)
    if command != "embed" and "few.txt" not in str(given):  # which have to read the text first
        assert not [*tmp_path.glob("runs/*"), *tmp_path.glob("cache/*")]


def assert_one_line(capsys: pytest.CaptureFixture[str], *named: str) -> None:
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("distcse: ")]
    assert len(lines) == 1 and "Traceback" not in shown.err, shown.err
    assert [words for words in named if words not in lines[0]] == [], lines[0]


def test_settings_are_compared_with_the_hubs_configuration(
    place: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model in the hub's cache, in a sub-folder that modules.json names."""
    model, inside = tmp_path / "models--somebody--model", "0_Transformer"
    (snapshot := model / "snapshots" / "1").mkdir(parents=True)
    (snapshot / inside).mkdir()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("1")
    shutil.copy(place.tiny / "config.json", snapshot / inside)
    module = {"idx": 0, "path": inside, "type": "sentence_transformers.models.Transformer"}
    (snapshot / "modules.json").write_text(json.dumps([module]))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def check(*overrides: str) -> None:
        recipe = read_recipe(str(place.recipe), ["student.backbone=somebody/model", "student.pooling=mean", *overrides])
        require(model_questions(recipe, fetch=True))

    check()
    with fails_with(EncoderSettingError, "has 3 layers; allowed: 0 to 2"):
        check("student.layers=[0, 7]")


def test_what_is_missing_is_found_before_torch_is_imported_and_ray_starts(place: SimpleNamespace) -> None:
    given = [str(place.recipe), "training.workers=1"]
    wrong = ["corpus.path=/nowhere/text.txt", "student.backbone=package:no_such/model", "evaluation.data=/nowhere"]
    code = (
        f"import sys; from distcse.cli import main; print(*(main(['train', *{given}, word]) for word in {wrong})); "
        "print(*({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1", "1"], done.stdout
    assert all(line.startswith("distcse: [DCSE-") for line in done.stderr.splitlines())


LAUNCHED = {
    "torchrun": {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"},
    "mpirun (Open MPI)": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    "mpirun": {"PMI_SIZE": "2", "PMI_RANK": "1"},
    "srun": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
}


@pytest.mark.parametrize(("launcher", "command"), zip(LAUNCHED, ("train", "tune", "embed", "train"), strict=True))
def test_one_of_several_processes_of_a_launcher_is_refused(
    launcher: str,
    command: str,
    place: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    before = sorted(place.folder.rglob("*"))
    assert cli.main([command, str(place.recipe)]) == 2
    assert_one_line(capsys, f"[{ArgumentError.code}]", "number 1 of 2", "training.workers=2", launcher)
    assert sorted(place.folder.rglob("*")) == before
    with fails_with(ArgumentError, "number 1 of 2"):
        run(read_recipe(str(place.recipe)), listen=lambda event: None)


def test_the_only_process_of_a_launcher_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in (
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # sbatch's script
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"},  # srun ray start
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            refuse_launchers()


def test_a_recipe_is_printed_with_what_would_change(place: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    """A number as people write it is a number; a run's recipe has the values with which it would be resumed."""
    for words, printed in (
        ([str(place.recipe), "training.lr=1e-5"], "lr: 1.0e-05"),
        (["--resume", str(place.run), "training.log_every=7"], "log_every: 7"),
    ):
        assert cli.main(["train", *words, "--print-recipe"]) == 0
        assert printed in capsys.readouterr().out


def test_an_endpoint_that_refuses_or_is_not_there(place: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    refuse = Reply('{"error": "invalid api key"}', 401)
    with open_endpoint(lambda body, headers: refuse) as url:
        for address, named in (
            (url, ["answers 401", "invalid api key", "OPENAI_API_KEY"]),
            ("http://127.0.0.1:9/v1", ["cannot be reached after 0 retries"]),
        ):
            endpoint = f"teachers.encoders.0.endpoint={{url: '{address}', retries: 0}}"
            given = [str(place.recipe), endpoint, "teachers.encoders.0.max_length=null", "--quiet"]
            assert cli.main(["train", *given]) == 1
            assert_one_line(capsys, *named)
