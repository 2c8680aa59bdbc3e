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

import distcse
from distcse.cluster.cluster import worker_environment
from distcse.errors import ArgumentError, EncoderSettingError
from distcse.events import DevScore, Event
from distcse.recipe import Recipe
from tests.conftest import ROOT
from tests.failures import fails_with


def test_everything_named_is_there() -> None:
    for name in distcse.__all__:
        assert getattr(distcse, name) is not None
    assert set(distcse.__all__) <= set(dir(distcse))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = distcse.trian  # type: ignore[attr-defined]


def test_no_module_is_in_a_functions_place() -> None:
    """`import distcse.train` sets distcse.train to the module: no public name may be a module's."""
    for name in distcse.__all__:
        assert find_spec(f"distcse.{name}") is None, name


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
    measured = distcse.measure(models, data=labelled, suites=["sts"], listen=events.append)
    figures = [measured.score("sts", "STS-B", "all", name) for name in models]
    assert figures[0] == figures[1] and "STS-B" in measured._repr_markdown_()
    assert {file.name for file in measured.write(tmp_path / "out")} == {"report.html", "report.md"}


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
    "texts": (lambda: distcse.measure({"m": "M"}, texts=["A.", "B."]), "texts"),  # type: ignore[arg-type]
    "several runs": (lambda: distcse.measure({"m": ["A", "B"]}), "['m=A', 'm=B']"),  # type: ignore[dict-item]
    "one suite": (lambda: distcse.measure({"m": "M"}, data=".", suites="sts"), "['sts']"),
    "a model of torch": (lambda: distcse.measure({"m": torch.nn.Linear(1, 1)}), "Encoder"),  # type: ignore[dict-item]
    "limits as a dict": (lambda: distcse.measure({"m": "M"}, limits={"ms": 3}), "Limits"),  # type: ignore[arg-type]
    "no function": (lambda: distcse.measure({"m": "M"}, stop_requested=True), "Callable"),  # type: ignore[arg-type]
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
    measured = distcse.measure([f"thin={tiny()}"], data=labelled, load_options=distcse.LoadOptions(pooling="mean"))
    printed = capsys.readouterr()
    assert printed.out == "" and "thin" in printed.err and "in the model" in printed.err
    assert [about.name for about in measured.evaluation.models] == ["thin"]
