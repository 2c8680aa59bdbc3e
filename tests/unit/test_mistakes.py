"""The likeliest mistakes, made with the real commands: one message names the problem, its place and what to type."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distcse import cli, run
from distcse.checks import require
from distcse.devices.process import refuse_launchers
from distcse.errors import ArgumentError, CorpusNotFoundError, EncoderSettingError
from distcse.models import Encoder
from distcse.preflight.models import model_questions
from distcse.recipe import BaseRecipe, Recipe, read_recipe, recipe_yaml
from distcse.runs.directory import write_recipe
from distcse.storage import open_store
from tests.commands import command
from tests.endpoints import Reply, open_endpoint
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.pairs import make_mutual_recipe

pytestmark = pytest.mark.usefixtures("without_ray")
COMMANDS = {
    "train": command("train"),
    "tune": command("tune"),
    "evaluate": command("evaluate"),
    "embed": command("embed"),
}


class Place:
    """A folder with a recipe that works, and everything that is needed to break it."""

    def __init__(self, folder: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path) -> None:
        self.folder, self.tiny = folder, tiny("bert")
        recipe = make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences, "training.max_steps=4")
        self.recipe = folder / "works.yaml"
        self.recipe.write_text(recipe_yaml(recipe))
        self.labelled = labelled
        (folder / "not.yaml").write_text("student: {backbone: x\n")
        (folder / "twice.yaml").write_text("name: a\nstudent: {backbone: x}\nname: b\n")
        (folder / "text.jsonl").write_text(json.dumps({"body": "A sentence."}) + "\n")
        (folder / "few.txt").write_text("One.\nTwo.\nThree.\n")
        (folder / "file").write_text("in the way")
        (folder / "empty").mkdir()
        self.pickled = shutil.copytree(self.tiny, folder / "pickled")
        torch.save(load_file(self.pickled / "model.safetensors"), self.pickled / "pytorch_model.bin")
        (self.pickled / "model.safetensors").unlink()
        self.adapter = folder / "adapter"
        self.adapter.mkdir()
        (self.adapter / "adapter_config.json").write_text("{}")
        (folder / "space.yaml").write_text("parameters: {objective.rank.tua2: {values: [0.1]}}\n")
        self.run = folder / "runs" / "begun"
        self.run.mkdir(parents=True)
        write_recipe(open_store(self.run), recipe)


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> Place:
    return Place(tmp_path_factory.mktemp("mistakes"), tiny, sentences, labelled)


R = "{p.recipe}"
MISTAKES: list[tuple[str, list[str], int, list[str]]] = [
    # the recipe and how it is named
    ("train", [], 2, ["name a recipe or a YAML file", "minilm-3layer"]),
    ("train", ["quikstart"], 2, ["no recipe or file 'quikstart'", "did you mean 'quickstart'?"]),
    ("train", [R, "trianing.lr=2e-5"], 2, ["unknown key trianing", "did you mean 'training'?"]),
    ("train", [R, "teachers.encoders.0.alhpa=2"], 2, ["teachers.encoders.0.alhpa (value 2)", "did you mean 'alpha'?"]),
    ("train", [R, "training.lr", "2e-5"], 2, ["'training.lr' is not of the form key.path=value, such as training.lr=2e-5"]),
    ("train", [R, "training.lr=fast"], 2, ["training.lr is 'fast'; expected a valid number"]),
    ("train", [R, "training.lr=30"], 2, ["training.lr is 30; expected less than or equal to 1"]),
    ("train", [R, "objective.rank.form=listnet"], 2, ["did you mean 'list_net'?", "list_mle"]),
    ("train", [R, "teachers.encoders.3.alpha=1"], 2, ["'3' is no place in a list of 1; allowed: 0 to 1"]),
    ("train", ["{p.folder}/not.yaml"], 2, ["not.yaml is not YAML", "line"]),
    ("train", ["{p.folder}/twice.yaml"], 2, ["line 3: key 'name' was given on line 1 already; keep one"]),
    ("train", [R, "teachers.encoders=[]"], 2, ["needs teachers; add teachers.encoders, or write objective.rank: null"]),
    ("train", [R, "training.workers=3"], 2, ["workers is 3, which does not divide batch_size 16; allowed: 1, 2, 4, 8, 16"]),
    ("train", [R, "training.zero_stage=1"], 2, ["zero_stage needs DeepSpeed; write engine: deepspeed, or zero_stage: 0"]),
    (
        "train",
        [R, "teachers.encoders.0.endpoint={{url: 'host:8080/v1'}}"],
        2,
        ["endpoint.url", "'host:8080/v1' is no address; write one such as http://host:8080/v1"],
    ),
    ("train", [R, "evaluation.dev=stsb"], 2, ["evaluation.data is not set; write evaluation.data: FOLDER"]),
    # the text
    ("train", [R, "corpus.path=/nowhere/text.txt"], 1, ["corpus file /nowhere/text.txt does not exist"]),
    ("train", [R, "corpus.path=null"], 1, ["DCSE-C01", "corpus.path=FILE"]),
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
    ("train", [R, "student.backbone={p.pickled}"], 1, ["DCSE-M04", "pytorch_model.bin but no safetensors"]),
    ("train", [R, "student.backbone=package:no_such/model"], 1, ["package 'no_such' is not installed", "pip install no_such"]),
    ("train", [R, "student.layers=[0, 7]"], 2, ["DCSE-M09", "layers", "7", "has 3 layers; allowed: 0 to 2"]),
    ("train", [R, "student.max_length=4096"], 2, ["max_length is 4096", "at most"]),
    ("train", [R, "student.backbone={p.run}"], 1, ["DCSE-M01", "/model"]),
    ("train", [R, "student.backbone={p.adapter}"], 1, ["adapter", "merge"]),
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
    ("tune", [R, "--space", "{p.folder}/space.yaml"], 2, ["objective.rank.tua2", "did you mean 'tau2'?"]),
    ("evaluate", ["{p.tiny}", "--suite", "stss", "--data", "{p.labelled}"], 1, ["DCSE-E04", "'stss'", "sts, transfer"]),
    ("evaluate", ["{p.tiny}", "--pooling", "mean"], 1, ["DCSE-E04", "--data"]),
    ("evaluate", ["{p.folder}/empty", "--data", "{p.labelled}"], 1, ["DCSE-M02", "empty", "model.safetensors"]),
    ("embed", [R, "--compare"], 1, ["two teachers"]),
]  # fmt: skip


@pytest.mark.parametrize(("command", "arguments", "status", "named"), MISTAKES, ids=lambda value: None)
def test_one_message(
    command: str, arguments: list[str], status: int, named: list[str], place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [argument.format(p=place) for argument in arguments]
    assert COMMANDS[command]([*given, "--quiet"]) == status
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("distcse: ")]
    assert len(lines) == 1 and "Traceback" not in shown.err, shown.err
    lacking = [words for words in named if words not in lines[0]]
    assert not lacking, f"{lacking} not in: {lines[0]}"


@pytest.mark.parametrize(
    "override",
    [
        "tau2=0.1",
        "corpus.path=/nowhere/text.txt",
        "corpus.path=null",
        "corpus.path={p.folder}/text.jsonl",
        "corpus.path=package:no_such_package/text.txt",
        "student.backbone=./no-such-model",
        "student.backbone=package:no_such/model",
        "teachers.encoders.0.backbone=./no-such-model",
        "student.backbone=nobody/no-such-model",
        "teachers.encoders.0.backbone=nobody/no-such-model",
        "evaluation.data={p.folder}/empty",
        "student.layers=[0, 7]",
        "student.max_length=4096",
        "teachers.encoders.0.max_length=4096",
        "teachers.encoders.0.pooling=null",
        "student.backbone={p.pickled}",
    ],
)
def test_what_is_missing_is_found_before_there_is_a_run(override: str, place: Place, tmp_path: Path) -> None:
    """No folder of a run, and nothing read into the cache."""
    given = [override.format(p=place), f"storage.runs={tmp_path}/runs", f"storage.cache={tmp_path}/cache"]
    assert cli.main(["train", str(place.recipe), *given, "--quiet"]) in (1, 2)
    assert [file for file in tmp_path.rglob("*") if file.name not in ("runs", "cache")] == []


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ("pairs.path={p.folder}/text.jsonl", "sentence1"),
        ("pairs.columns=[body, other]", "body"),
        ("pairs={{task: no_such_task}}", "no_such_task"),
        ("pairs={{mine: {{corpus: {{path: '{p.folder}/text.jsonl'}}}}}}", "corpus.column"),
        ("pairs={{mine: {{corpus: {{path: /nowhere/text.txt}}}}}}", "/nowhere/text.txt"),
    ],
)
def test_what_a_mutual_distillation_lacks_is_found_before_there_is_a_run(
    pairs: str,
    named: str,
    place: Place,
    sentences: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / "mutual.yaml"
    recipe.write_text(recipe_yaml(make_mutual_recipe(tmp_path, {"bert": place.tiny}, sentences)))
    places = (f"storage.runs={tmp_path}/runs", f"storage.cache={tmp_path}/cache", f"evaluation.data={place.labelled}")
    assert cli.main(["train", str(recipe), pairs.format(p=place), *places, "--quiet"]) in (1, 2)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("distcse: "))
    assert named in line and [*(tmp_path / "runs").glob("*")] == []


@pytest.fixture
def hub(tmp_path: Path, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that stores a model's configuration in the hub's cache, in a sub-folder where it is named."""

    def store(name: str, inside: str = "", kind: str = "bert") -> None:
        snapshot = tmp_path / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "1"
        (snapshot / inside).mkdir(parents=True)
        shutil.copy(tiny(kind) / "config.json", snapshot / inside)
        if inside:
            (snapshot / "modules.json").write_text(
                json.dumps([{"idx": 0, "path": inside, "type": "sentence_transformers.models.Transformer"}])
            )
        refs = snapshot.parents[1] / "refs"
        refs.mkdir()
        (refs / "main").write_text("1")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return store


def require_models(recipe: BaseRecipe) -> None:
    """Check the recipe's models, as a run does before it has a folder."""
    require(model_questions(recipe, fetch=True))


@pytest.mark.parametrize("inside", ["", "0_Transformer"])
def test_settings_are_compared_with_the_hubs_configuration(place: Place, hub: Callable[..., None], inside: str) -> None:
    hub("somebody/model", inside)
    base = ["student.backbone=somebody/model", "student.pooling=mean"]
    require_models(read_recipe(str(place.recipe), base))
    with fails_with(EncoderSettingError, "has 3 layers; allowed: 0 to 2"):
        require_models(read_recipe(str(place.recipe), [*base, "student.layers=[0, 7]"]))


def test_positions_of_roberta_begin_after_that_of_padding(place: Place, tiny: Callable[..., Path]) -> None:
    positions = json.loads((tiny("roberta") / "config.json").read_text())["max_position_embeddings"]
    roberta = [f"student.backbone={tiny('roberta')}", f"student.max_length={positions}"]
    with fails_with(EncoderSettingError, f"allowed: at most {positions - 2}, the backbone's positions"):
        require_models(read_recipe(str(place.recipe), roberta))
    encoder = read_recipe(str(place.recipe), [roberta[0], f"student.max_length={positions - 2}"])
    require_models(encoder)
    assert isinstance(encoder, Recipe) and Encoder.from_section(encoder.student).max_length == positions - 2


def test_a_model_that_the_hub_lacks_is_found_before_there_is_a_sweep(place: Place, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("parameters: {objective.rank.tau2: {values: [0.1, 0.2]}}\n")
    given = ["student.backbone=nobody/no-such-model", f"storage.runs={tmp_path}/runs"]
    assert cli.main(["tune", str(place.recipe), "--space", str(space), *given, "--quiet"]) == 1
    assert [file for file in tmp_path.rglob("*") if file.name not in ("runs", "cache")] == [space]


@pytest.mark.parametrize(
    "override",
    [
        "corpus.path=/nowhere/text.txt",
        "student.backbone=package:no_such/model",
        "teachers.encoders.0.backbone=./no-such-model",
        "evaluation.data=/nowhere",
    ],
)
def test_what_is_missing_is_found_before_torch_is_imported_and_ray_starts(override: str, place: Place) -> None:
    given = [str(place.recipe), "training.workers=1", override]
    code = (
        f"import sys; from distcse.cli import main; status = main({['train', *given]}); "
        "print(status, *({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"], done.stdout
    assert done.stderr.startswith("distcse: [DCSE-")


LAUNCHED = {
    "torchrun": {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"},
    "mpirun (Open MPI)": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    "mpirun": {"PMI_SIZE": "2", "PMI_RANK": "1"},
    "srun": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
}


@pytest.mark.parametrize("launcher", LAUNCHED)
@pytest.mark.parametrize("command", ["train", "tune", "embed"])
def test_one_of_several_processes_of_a_launcher_is_refused(
    launcher: str, command: str, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in LAUNCHED[launcher].items():
        monkeypatch.setenv(name, value)
    before = sorted(place.folder.rglob("*"))
    assert COMMANDS[command]([str(place.recipe)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"[{ArgumentError.code}]" in line and "number 1 of 2" in line and "training.workers=2" in line
    assert launcher in line and sorted(place.folder.rglob("*")) == before
    with fails_with(ArgumentError, "number 1 of 2"):
        run(read_recipe(str(place.recipe)), listen=lambda event: None)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # salloc's shell
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # sbatch's script
        {
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "0",
            "RAY_JOB_CONFIG_JSON_ENV_VAR": "{}",
        },  # srun ray start, a job
    ],
)
def test_the_only_process_of_a_launcher_is_not_refused(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    refuse_launchers()


def test_a_number_as_people_write_it_is_a_number(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(place.recipe), "training.lr=1e-5", "--print-recipe"]) == 0
    assert "lr: 1.0e-05" in capsys.readouterr().out


def test_the_recipe_of_a_run_is_printed_with_what_would_change(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "--resume", str(place.run), "training.log_every=7", "--print-recipe"]) == 0
    assert "log_every: 7" in capsys.readouterr().out


def test_for_programs_the_error_is_an_object(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(place.recipe), "corpus.path=/nowhere.txt", "--json"]) == 1
    shown = capsys.readouterr()
    last = json.loads(shown.out.splitlines()[-1])
    message = last.pop("message")
    assert last == {"event": "Error", "code": CorpusNotFoundError.code, "kind": "CorpusNotFoundError"}
    assert "/nowhere.txt" in message and "corpus.path" in message


@pytest.fixture
def refusing() -> Iterator[str]:
    """An endpoint that refuses the key."""
    with open_endpoint(lambda body, headers: Reply('{"error": "invalid api key"}', 401)) as url:
        yield url


def test_an_endpoint_that_refuses_or_is_not_there(
    place: Place, refusing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for url, named in (
        (refusing, ["answers 401", "invalid api key", "OPENAI_API_KEY"]),
        ("http://127.0.0.1:9/v1", ["cannot be reached after 0 retries"]),
    ):
        endpoint = f"teachers.encoders.0.endpoint={{url: '{url}', retries: 0}}"
        assert cli.main(["train", str(place.recipe), endpoint, "teachers.encoders.0.max_length=null", "--quiet"]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distcse: ")]
        assert len(lines) == 1 and not [words for words in named if words not in lines[0]], lines
