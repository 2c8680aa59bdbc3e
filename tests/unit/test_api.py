"""Python's side: what `distcse` names, what it costs to import, a run and a comparison as functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict

import distcse
from distcse.cli import main
from distcse.cluster.cluster import worker_environment
from distcse.devices.process import NO_GAIN
from distcse.errors import ArgumentError, EncoderSettingError, UnknownKeyError
from distcse.events import DevScore, Event
from distcse.losses.views import TeacherOutputs, Views
from distcse.recipe import Recipe
from tests.conftest import ROOT
from tests.failures import fails_with


def test_everything_named_is_there_and_no_module_is_in_its_place() -> None:
    """`import distcse.train` sets distcse.train to the module: no public name may be a module's."""
    for name in distcse.__all__:
        assert getattr(distcse, name) is not None and find_spec(f"distcse.{name}") is None, name
    assert set(distcse.__all__) <= set(dir(distcse))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = distcse.trian  # type: ignore[attr-defined]


def test_importing_it_and_reading_a_recipe_needs_no_torch() -> None:
    code = (
        "import sys, distcse, distcse.errors; distcse.__version__; "
        "print({'torch', 'ray', 'transformers', 'numpy', 'pydantic', 'rich'} & {*sys.modules}); "
        "distcse.read_recipe('quickstart'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines() == ["set()", "False"]


SECRETS = {
    "HF_TOKEN": "hf_SentinelOfTheHub",
    "OPENAI_API_KEY": "sk-SentinelOfTheEndpoint",
    "DISTCSE_PASSWORD": "SentinelOfOurOwn",
    "RAY_AUTH_TOKEN": "SentinelOfRay",
    "AWS_ACCESS_KEY_ID": "SentinelOfTheBucket",
    "AWS_SECRET_ACCESS_KEY": "SentinelOfItsSecret",
    "GOOGLE_APPLICATION_CREDENTIALS": "SentinelOfTheCloud",
}


@pytest.fixture
def secrets_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, "HF_HOME": "/models", "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("secrets_in_environment")
def test_workers_get_settings_and_no_secrets() -> None:
    environment = worker_environment(gpus=0)
    assert environment["HF_HOME"] == "/models" and environment["TOKENIZERS_PARALLELISM"] == "false"
    assert not SECRETS.keys() & environment.keys() and not set(SECRETS.values()) & set(environment.values())


@pytest.mark.usefixtures("secrets_in_environment")
def test_a_run_its_student_and_its_scores(
    recipe_with: Callable[..., Recipe], tmp_path: Path, labelled: Path, sentences: list[str], capsys: Any
) -> None:
    recipe_with()  # writes recipe.yaml
    capsys.readouterr()
    events: list[Event] = []
    run = distcse.run(tmp_path / "recipe.yaml", "training.max_steps=3", "training.log_every=1", listen=events.append)
    assert not run.interrupted and run.models == {"student": run.model} and run.model.is_dir()
    assert any(isinstance(event, DevScore) for event in events) and capsys.readouterr().err == ""
    assert {file.name for file in run.reports} == {"report.html", "report.md"} and all(f.is_file() for f in run.reports)
    assert (run.model / "README.md").read_text().startswith("---")
    encoder = run.encoder()
    assert encoder.encode(sentences[:3]).shape == (3, 32)
    assert run.scores is not None and "| student |" in run.scores._repr_markdown_()
    assert "| teacher |" not in run.scores._repr_markdown_()  # the only teacher's agreement with itself is no score

    stored = [file for folder in ("runs", "cache") for file in (tmp_path / folder).rglob("*") if file.is_file()]
    assert run.directory / "run.json" in stored and len(stored) > 10
    for file in stored:
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in SECRETS.values()), file

    models: dict[str, Any] = {"from the folder": run.directory, "in memory": encoder}
    measured = distcse.evaluate(models, data=labelled, suites=["sts"], listen=events.append)
    figures = [measured.score("sts", "STS-B", "all", name) for name in models]
    assert figures[0] == figures[1] and "STS-B" in measured._repr_markdown_()
    assert {file.name for file in measured.write(tmp_path / "out")} == {"report.html", "report.md"}


class Pull(torch.nn.Module):
    """Pulls the views of a sentence together."""

    def __init__(self, strength: float = 1.0) -> None:
        super().__init__()
        self.strength = strength

    def forward(self, views: Views, teachers: TeacherOutputs) -> torch.Tensor:
        return self.strength * (views.z1 - views.z2).square().sum() / views.columns


class Hidden(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()


def local_loss() -> type[torch.nn.Module]:
    class Inside(torch.nn.Module):
        pass

    return Inside


TWO_COLUMNS = Dataset.from_dict({"title": ["A"], "body": ["B"]})


def test_distil_from_lists_and_compare(
    tiny: Callable[..., Path], sentences: list[str], tmp_path: Path, labelled: Path
) -> None:
    teacher, student = tiny("minilm", width=64), tiny("bert", layers=4)
    storage = {"storage.runs": str(tmp_path / "runs"), "storage.cache": str(tmp_path / "cache")}
    documents = Dataset.from_dict({"text": sentences[100:200]})
    run = distcse.distill(
        [{"backbone": str(model), "pooling": "mean"} for model in (teacher, student)],
        student,
        layers=2,
        max_length=16,
        queries=sentences[:100],
        documents=documents,
        workers=0,
        epochs=1,
        **storage,
    )
    recipe = run.result.recipe
    assert isinstance(recipe, Recipe) and recipe.student.layers == [1, 3] and recipe.training.epochs == 1
    assert [encoder.max_length for encoder in recipe.teachers.encoders] == [16, 16] == [recipe.student.max_length, 16]
    assert [(source.role, source.limit) for source in recipe.corpus.sources] == [("query", None), ("document", None)]
    assert len([*(tmp_path / "cache" / "texts").iterdir()]) == 2
    with fails_with(UnknownKeyError, "epoch"):
        distcse.run("best-small", values={"epoch": 3})

    own, folder, texts = run.scores, run.compare(labelled, run.directory), run.compare(sentences[:40])
    assert own is not None and {"student", "start", "teacher 0", "teacher 1"} >= own.to_dict().keys()
    figure = folder.score("sts", "STS-B", "all", "student")
    assert folder.to_dict()["student"]["sts/STS-B/all"] == figure and f"{figure:.2f}" in str(folder)
    assert folder.to_pandas().loc["student", ("sts", "STS-B", "all")] == figure and "STS-B" in folder.to_latex()
    assert "one sentence" in str(folder) and "kept@10" in str(texts) and "one sentence" in str(texts)
    vectors = run.sentence_transformer().encode(sentences[:3])
    assert torch.allclose(torch.tensor(vectors), torch.tensor(run.encoder().encode(sentences[:3])), atol=1e-5)


PULL = "{class_path: 'tests.unit.test_api:Pull', weight: 0.5, kwargs: {strength: 0.5}}"


def test_seeds_with_a_loss_of_ones_own(
    recipe_with: Callable[..., Recipe], sentences: list[str], tmp_path: Path, labelled: Path, capsys: Any
) -> None:
    recipe_with()
    few = {"max_steps": 3, "objective.custom.pull.weight": 0.5}
    given: dict[str, Any] = {"values": few, "texts": sentences[:64], "losses": {"pull": Pull(0.5)}}
    runs = distcse.run(tmp_path / "recipe.yaml", **given, seeds=[1, 2])
    assert len(runs) == 2 and not runs.interrupted and [*runs.by_seed] == [1, 2]
    recipes = [run.result.recipe for run in runs]
    assert [recipe.seed for recipe in recipes] == [1, 2]
    assert all(
        isinstance(recipe, Recipe) and recipe.objective.custom["pull"].kwargs == {"strength": 0.5} for recipe in recipes
    )
    means = str(runs.scores)
    assert "student, seed 2" in means and "mean ± standard deviation" in means and "student, seed 1" in means
    assert {file.name for file in runs.reports} == {"report.html", "report.md"}
    for page in (runs.directory / "report.md", *(run.model / "README.md" for run in runs)):
        assert "mean ± standard deviation" in page.read_text()

    one = distcse.run(tmp_path / "recipe.yaml", f"storage.run_id={runs.directory.name}", **given, seeds=[1])
    for run in (*runs, *one):
        assert "model-index" in (run.model / "README.md").read_text()
    (stored,) = (tmp_path / "cache" / "texts").iterdir()
    capsys.readouterr()
    words = ["train", str(tmp_path / "recipe.yaml"), "training.max_steps=3", f"objective.custom.pull={PULL}"]
    words += ["--run-id", runs.directory.name, "--corpus", str(stored), "--quiet", "--seeds", "1", "2"]
    assert main([*words, "training.log_every=2"]) in (0, NO_GAIN)  # finished: nothing is trained again
    printed = capsys.readouterr().out
    assert all(run.uri in printed for run in runs) and "mean ± standard deviation" in printed
    assert main(["train", "--seeds", "x"]) == 2 and "--seeds has no number" in capsys.readouterr().err

    table = distcse.evaluate({"mine": runs, "again": [*runs], "one": runs[0]}, texts=sentences[:40])
    names = [about.name for about in table.evaluation.models]
    assert names == ["mine, seed 1", "mine, seed 2", "again, run 1", "again, run 2", "one"]
    both, one_alone = runs.compare(labelled), runs[0].compare(labelled)
    assert both.score("sts", "STS-B", "all", "student, seed 1") == one_alone.score("sts", "STS-B", "all", "student")


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a recipe as a dict": (lambda: distcse.run({"name": "x"}), "BaseRecipe | str | Path"),  # type: ignore[arg-type]
    "settings as a dict": (lambda: distcse.run("best-small", {"training.lr": 1e-4}), "'training.lr=0.0001'"),  # type: ignore[arg-type]
    "texts as a corpus": (lambda: distcse.run("best-small", corpus=["A."]), "'corpus.path=…'"),  # type: ignore[call-arg]
    "overrides of a recipe": (lambda: distcse.run(distcse.read_recipe("best-small"), "seed=1"), "overrides"),
    "another keyword": (lambda: distcse.run("best-small", epoch_s=3), "stop_requested"),  # type: ignore[call-arg]
    "no recipe": (lambda: distcse.run(), "'recipe'"),  # type: ignore[call-arg]
    "a number": (lambda: distcse.resume(3), "directory"),  # type: ignore[arg-type]
    "an unset variable": (lambda: distcse.rerun(""), "directory"),
    "a name as a recipe": (lambda: distcse.with_values("best-small", {}), "distcse.read_recipe('best-small')"),  # type: ignore[type-var]
    "one override": (lambda: distcse.read_recipe("best-small", "seed=3"), "['seed=3']"),
    "a text that is none": (lambda: distcse.evaluate({"m": "M"}, texts=["A.", 3]), "Sequence[str]"),  # type: ignore[list-item]
    "nothing to learn from": (lambda: distcse.distill("M", "M"), "texts=…"),
    "queries without documents": (lambda: distcse.distill("M", "M", queries=["A?"]), "documents=…"),
    "a list with a number": (lambda: distcse.run("best-small", texts=["A.", 3]), "number 1 of the texts"),  # type: ignore[list-item]
    "data of many columns": (lambda: distcse.run("best-small", texts=TWO_COLUMNS), "dataset['title']"),
    "splits": (lambda: distcse.run("best-small", texts=DatasetDict(train=TWO_COLUMNS)), "dataset['train']"),
    "a local loss": (lambda: distcse.run("best-small", losses={"own": local_loss()}), "top of a module"),
    "a loss with a hidden argument": (lambda: distcse.run("best-small", losses={"own": Hidden(1)}), "self.size = size"),
    "a loss with a tensor": (lambda: distcse.run("best-small", losses={"own": Pull(torch.ones(2))}), "kwargs.strength"),  # type: ignore[arg-type]
    "one suite": (lambda: distcse.evaluate({"m": "M"}, data=".", suites="sts"), "['sts']"),
    "a model of torch": (lambda: distcse.evaluate({"m": torch.nn.Linear(1, 1)}), "Encoder"),  # type: ignore[dict-item]
    "limits as a dict": (lambda: distcse.evaluate({"m": "M"}, limits={"ms": 3}), "Limits"),  # type: ignore[arg-type]
    "no function": (lambda: distcse.evaluate({"m": "M"}, stop_requested=True), "Callable"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_one_error_that_says_what_to_pass(case: str) -> None:
    call, named = WRONG[case]
    with fails_with(ArgumentError, named):
        call()


def test_a_recipe_is_read_from_a_path_and_an_encoder_names_its_settings(tiny: Callable[..., Path]) -> None:
    assert distcse.read_recipe(Path("minilm-3layer")).name == "minilm-3layer"
    with fails_with(EncoderSettingError, "poling", "pooling"):
        distcse.Encoder.load(tiny("bert"), poling="mean")


def test_without_a_listener_progress_goes_to_standard_error(
    labelled: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    measured = distcse.evaluate([f"thin={tiny()}"], data=labelled, load_options=distcse.LoadOptions(pooling="mean"))
    printed = capsys.readouterr()
    assert printed.out == "" and "thin" in printed.err and "in the model" in printed.err
    assert [about.name for about in measured.evaluation.models] == ["thin"]
