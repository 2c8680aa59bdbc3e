"""`python -m distcse evaluate`, called as on the command line."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from distcse import api
from distcse.devices.device import DeviceSpeed
from distcse.devices.process import INTERRUPTED
from distcse.errors import (
    DistcseError,
    EncoderSettingError,
    EvaluationDataError,
    EvaluationOptionError,
    EvaluationResultError,
    ModelNotFoundError,
    StoppedEarlyError,
)
from distcse.evaluation import (
    Candidate,
    Choice,
    Contamination,
    Ensemble,
    Evaluation,
    Limits,
    LoadOptions,
    ModelInfo,
    ScoredPairs,
    VectorModel,
    make_ensembles,
    open_candidate,
    read_table,
)
from distcse.events import Event, StageProgress
from distcse.models import Encoder
from distcse.report.progress import JsonView
from tests.commands import command
from tests.failures import fails_with
from tests.models import make_cross_encoder

main = command("evaluate")


def test_one_command_evaluates_and_writes(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "report"
    models = [f"first={tiny()}", f"second={tiny('bert', width=64)}"]
    arguments = [*models, "--suite", "sts,pairs", "--data", str(labelled), "--pooling", "mean", "--out", str(out)]
    assert main([*arguments, "--precision", "fp32"]) == 0
    shown = capsys.readouterr()
    assert "average of 2 of 7" in shown.out and "AUC" in shown.out and f"written {out}/report.html" in shown.out
    assert "missing   STS13" in shown.err and "second" in shown.err
    assert {file.name for file in out.iterdir()} == {
        "report.html",
        "report.md",
        "evaluation.json",
        "scores.csv",
        "scores.tex",
    }
    stored = json.loads((out / "evaluation.json").read_text())
    assert stored["settings"] == {"STS": "all", "device": "cpu", "precision": "fp32"}
    assert [info["pooling"] for info in stored["models"]] == ["mean", "mean"]


def test_a_prompt_is_for_all_models_or_for_one(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt for one model leaves the others as they are; = alone is for all, and may contain another."""
    models = [f"one={tiny()}", f"two={tiny('bert', width=64)}"]
    arguments = ["--data", str(labelled), "--suite", "sts", "--pooling", "mean", "--precision", "fp32", "--json"]

    def scores(names: list[str], *prompts: str) -> dict[str, float]:
        options = [part for prompt in prompts for part in ("--prompt", prompt)]
        assert main([*names, *arguments, *options]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        values: dict[str, float] = next(line["values"] for line in lines if line.get("set") == "STS-B")
        return values

    plain, both, single = scores(models), scores(models, "a guitar "), scores(models, "two=a guitar ")
    assert single == {"one": plain["one"], "two": both["two"]} and both["one"] != plain["one"]
    assert scores(models, "=a guitar ") == both and scores(models, "a guitar ", "one=") == {**both, "one": plain["one"]}
    runs = scores([models[0], f"one={tiny('bert', width=64)}"], "one=a guitar ")
    assert runs == {"one, run 1": both["one"], "one, run 2": both["two"]}
    cross = make_cross_encoder(tmp_path / "cross", tiny())
    assert main([f"pairs={cross}", *arguments, "--prompt", "pairs=x"]) == 1
    assert "cross-encoder, which reads texts without a prompt" in capsys.readouterr().err
    for prompts, named in (
        (["tow=x"], "did you mean 'two'"),
        (["one=x", "one=y"], "two prompts"),
        (["a", "b"], "all models"),
    ):
        assert main([*models, *arguments, *(part for prompt in prompts for part in ("--prompt", prompt))]) == 1
        assert named in capsys.readouterr().err


@pytest.mark.parametrize("speedup", [0.02, 2.5])
def test_auto_precision_follows_the_devices_speed_and_is_stored(
    labelled: Path,
    tiny: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    speedup: float,
) -> None:
    device = DeviceSpeed("a CPU", "cpu", frozenset({"bf16"}), {"bf16": speedup})
    for module in ("distcse.api", "distcse.evaluation.candidates"):
        monkeypatch.setattr(f"{module}.speed_of", lambda name: device)
    chosen = "bf16" if speedup > 1 else "fp32"
    assert main([str(tiny()), "--data", str(labelled), "--pooling", "mean", "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["settings"]["precision"] == chosen
    assert f"{chosen}: models (a CPU: bf16 products {speedup:g}x as fast as fp32)" in capsys.readouterr().err
    assert main([str(tiny()), "--data", str(labelled), "--pooling", "mean", "--precision", "bf16", "--dry-run"]) == 0
    assert ("precision: bf16" in capsys.readouterr().err) == (chosen == "fp32")  # the warning names the key


@pytest.mark.parametrize("stops_in", ["texts", "sets"])
@pytest.mark.parametrize("stopped", ["first", "second"])
def test_ctrl_c_shows_the_models_measured_so_far(
    stopped: str,
    stops_in: str,
    labelled: Path,
    tiny: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    show = JsonView.show

    def press(view: JsonView, event: Event) -> None:
        show(view, event)
        if isinstance(event, StageProgress) and event.name == stopped and event.unit.startswith(stops_in):
            monkeypatch.setattr(JsonView, "show", show)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(JsonView, "show", press)
    models = [f"first={tiny()}", f"second={tiny('bert')}", f"third={tiny('bert', width=64)}"]
    options = ["--suite", "sts,pairs", "--data", str(labelled), "--pooling", "mean", "--out", str(tmp_path), "--json"]
    assert main([*models, *options]) == INTERRUPTED
    shown = capsys.readouterr()
    assert "press Ctrl-C again" in shown.err and "checkpoint" not in shown.err
    events = [json.loads(line) for line in shown.out.splitlines()]
    if stopped == "first":
        assert events[-1]["code"] == StoppedEarlyError.code and not (tmp_path / "evaluation.json").exists()
        return
    assert {name for event in events if event["event"] == "Score" for name in event["values"]} == {"first"}
    warnings = json.loads((tmp_path / "evaluation.json").read_text())["warnings"]
    (stop,) = (warning for warning in warnings if "stopped" in warning)
    assert "of second" in stop


def test_runs_with_one_name_are_averaged(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [f"row={Path(shutil.copytree(tiny(), tmp_path / f'seed-{seed}'))}" for seed in (0, 1)]
    options = ["--data", str(labelled), "--pooling", "mean", "--suite", "sts", "--quiet"]
    assert main([*runs, f"other={tiny('minilm')}", *options, "--out", str(tmp_path / "out")]) == 0
    means = capsys.readouterr().out.partition("STS, mean ± standard deviation over runs")[2]
    stored = json.loads((tmp_path / "out" / "evaluation.json").read_text())["scores"][0]["values"]
    assert stored["row, run 1"] == stored["row, run 2"]
    (row,) = (line for line in means.splitlines() if line.startswith("row "))
    (other,) = (line for line in means.splitlines() if line.startswith("other "))
    assert f"{stored['row, run 1']:.2f} ± 0.00" in row and f"{stored['other']:.2f}" in other and "±" not in other
    for page in ("report.html", "report.md"):
        assert "mean ± standard deviation over runs" in (tmp_path / "out" / page).read_text()


def test_an_ensemble_is_a_row_with_the_mean_of_its_members_similarities(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [Path(shutil.copytree(tiny(), tmp_path / "seed-0")), tiny("minilm")]
    models = [f"row={folders[0]}", f"row={folders[1]}", f"other={tiny('bert', width=64)}"]
    options = ["--data", str(labelled), "--pooling", "mean", "--suite", "sts", "--precision", "fp32", "--quiet"]
    ensembles = ["--ensemble", "row", "--ensemble", "mix=row,other", "--ensemble", "all"]
    assert main([*models, *options, *ensembles, "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    stored = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    names = [model["name"] for model in stored["models"]]
    assert names == ["row, run 1", "row, run 2", "other", "ensemble of row", "mix", "ensemble"]
    assert stored["models"][3]["source"] == "mean of row, run 1, row, run 2"
    values = next(score["values"] for score in stored["scores"] if score["set"] == "STS-B")
    table = read_table(labelled / "sts" / "stsb" / "test.tsv.gz")
    first, second = table.texts("sentence1"), table.texts("sentence2")
    encoders = [Encoder.load(folder, pooling="mean") for folder in folders]
    cosines = [VectorModel.of(encoder).similarities(first, second) for encoder in encoders]
    expected = 100 * float(spearmanr(np.mean(cosines, axis=0), table.numbers("score")).statistic)
    assert values["ensemble of row"] == pytest.approx(expected, abs=1e-6)
    assert values["mix"] == values["ensemble"]


@pytest.mark.parametrize(
    ("ensemble", "named"),
    [
        ("one", ("one", "at least two")),
        ("one,three", ("'three'", "one, two")),
        ("two=one,two", ("'two'", "NAME=one,two")),
        ("one,cross", ("bi-encoder", "cross-encoder", "one kind")),
    ],
)
def test_ensembles_of_unfit_models_are_refused(ensemble: str, named: tuple[str, ...]) -> None:
    kinds = {"one": "bi-encoder", "two": "bi-encoder", "cross": "cross-encoder"}
    candidates = [Candidate(ModelInfo(name, name, kind, "cls", 32, 0), Ensemble([])) for name, kind in kinds.items()]
    with fails_with(EvaluationOptionError, "--ensemble", *named):
        make_ensembles([ensemble], candidates)


def test_tables_are_printed_if_the_report_cannot_be_written(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").mkdir()  # so that the file cannot be written
    assert main([str(tiny()), "--data", str(labelled), "--pooling", "mean", "--out", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "average of 2 of 7" in shown.out and "report.html" in shown.err


def test_unknown_choices_and_no_models_are_refused(labelled: Path, tiny: Callable[..., Path]) -> None:
    with fails_with(EvaluationOptionError, "aggregate", "'weighted'", "all, mean, wmean"):
        api.measure([str(tiny())], labelled, aggregate="weighted")
    with fails_with(EvaluationOptionError, "model"):
        api.measure({}, labelled)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (["nowhere", "--add", "sts={labelled}/sts/stsb/test.tsv.gz"], ModelNotFoundError, "nowhere"),
        (["{tiny}", "--data", "{labelled}", "--suite", "stss"], EvaluationOptionError, "'stss'"),
        (["{tiny}", "--data", "{labelled}/nowhere"], EvaluationDataError, "{labelled}/nowhere"),
        (["{tiny}"], EvaluationOptionError, "--data"),
        (["{tiny}", "--data", "{labelled}"], EncoderSettingError, "pooling"),
        (["a={tiny}", "a={tiny}", "--data", "{labelled}"], EvaluationOptionError, "name a"),
        (["{tiny}", "--data", "{labelled}", "--out", "/proc/no"], EvaluationResultError, "/proc/no"),
        (["{tiny}", "--mteb", "{labelled}", "--add", "sts=x.tsv"], EvaluationOptionError, "--data DIR"),
        (["{tiny}", "--mteb", "{labelled}", "--data", "{tiny}"], EvaluationDataError, "MTEB"),
        (["{tiny}", "--data", "{labelled}", "--pooling", "mean", "--max-mb", "0"], EvaluationOptionError, "above 0"),
        (["{tiny}", "--data", "{labelled}", "--pooling", "mean", "--max-ms", "nan"], EvaluationOptionError, "above 0"),
        (["{tiny}", "--data", "{labelled}", "--pooling", "mean", "--max-ms", "inf"], EvaluationOptionError, "above 0"),
        (
            ["{tiny}", "--data", "{labelled}", "--pooling", "mean", "--suite", "geometry", "--max-ms", "9"],
            EvaluationOptionError,
            "--suite sts,geometry",
        ),
    ],
)
def test_errors_are_one_line_with_a_code(
    arguments: list[str],
    error: type[DistcseError],
    named: str,
    labelled: Path,
    tiny: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = 2 if error is EncoderSettingError else 1
    assert main([argument.format(labelled=labelled, tiny=tiny()) for argument in arguments]) == status
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distcse: ")]
    assert len(lines) == 1 and f"[{error.code}]" in lines[0] and named.format(labelled=labelled) in lines[0]


def test_the_best_model_within_limits_is_named(
    labelled: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is timed on the sets' own sentences, and one row of several models, which has no size, is not chosen."""
    models = [f"wide={tiny('bert', width=64)}", f"thin={tiny('bert')}", "--ensemble", "both=wide,thin"]
    arguments = [*models, "--data", str(labelled), "--pooling", "mean", "--suite", "geometry,sts"]

    def choice(*limits: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        assert main([*arguments, *limits, "--json"]) == 0
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        (found,) = (event for event in events if event["event"] == "Choice")
        return found, {event["name"]: event for event in events if event["event"] == "Model"}

    best, timed = choice("--max-ms", "1e6")
    assert timed["wide"]["latency_ms"] > 0 and (best["suite"], best["set"]) == ("sts", "average of 2 of 7")
    sizes = {name: model["size_bytes"] / 1e6 for name, model in timed.items()}
    assert sizes["thin"] < sizes["wide"]
    assert choice("--max-mb", str(sizes["thin"]))[0]["name"] == "thin"
    assert choice("--max-mb", str(sizes["wide"]))[0]["name"] == best["name"]
    assert choice("--max-mb", str(sizes["thin"] / 2))[0]["name"] is None
    assert main([*arguments, "--max-ms", "1e-6", "--max-mb", "1000"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    named = "no model with a score in sts average of 2 of 7 is within 1e-06 ms and 1000 MB: the fastest takes"
    assert line.startswith(named) and "the smallest has" in line


def test_the_choice_has_the_best_score_among_the_models_that_keep_the_limits(evaluation: Evaluation) -> None:
    needs = {"wide": (2.0, 9_000_000), "thin": (1.0, 3_000_000), "cross": (8.0, 4_000_000)}
    models = [
        replace(model, latency_ms=needs[model.name][0], size_bytes=needs[model.name][1]) for model in evaluation.models
    ]
    average = next(score for score in evaluation.scores if score.suite == "sts" and score.average)
    values = {"wide": 70.0, "thin": 50.0, "cross": 90.0}
    scores = [replace(score, values=values) if score == average else score for score in evaluation.scores]
    found = replace(evaluation, models=models, scores=scores)
    expected = {(None, 9.0): "cross", (8.0, None): "cross", (2.0, None): "wide", (2.0, 9.0): "wide", (9.0, 3.5): "thin"}
    for (ms, mb), name in expected.items():
        choice = Choice.of(found, Limits(ms, mb))
        assert choice is not None and choice.model is not None and choice.model.name == name
        assert str(choice).startswith(f"best within {Limits(ms, mb)}: {name}, sts average")
    assert Choice.of(found, Limits()) is None
    shown = replace(found, models=[replace(model, latency_ms=6.04, size_bytes=80_040_000) for model in models])
    for limits, is_kept in ((Limits(6.04, 80.04), True), (Limits(6), False), (Limits(mb=80), False)):
        assert bool((kept := Choice.of(shown, limits)) and kept.model) == is_kept, limits
    unscored = [
        replace(score, values={"wide": 70.0, "cross": math.nan}) if score.average else score for score in scores
    ]
    nothing = Choice.of(replace(found, scores=unscored), Limits(1.5))
    assert nothing is not None and nothing.model is None
    assert str(nothing).endswith("the fastest takes 2.0 ms, the smallest has 9.0 MB"), "of the models with a score"


def test_documents_by_another_model(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "find"
    folder.mkdir()
    (folder / "queries.tsv").write_text("id\ttext\n1\tA man plays.\n2\tThe dog runs.\n")
    (folder / "corpus.tsv").write_text("id\ttext\na\tA man plays a guitar.\nb\tA dog is running.\nc\tShe sings.\n")
    (folder / "relevant.tsv").write_text("query_id\tcorpus_id\n1\ta\n2\tb\n")
    same, wide = f"same={tiny('bert')}", f"wide={tiny('bert', width=64)}"
    arguments = [same, "--pooling", "mean", "--add", f"retrieval:find={folder}", "--out", str(tmp_path / "out")]
    assert main([*arguments, "--documents", same]) == 0
    scores = json.loads((tmp_path / "out" / "evaluation.json").read_text())["scores"]
    found = {(score["set"], score["measure"]): score["values"] for score in scores}
    for measure in ("recall@1", "mrr@10"):
        assert found["find", measure] == found["find, documents by same", measure]
    assert "find, documents by same" in capsys.readouterr().out
    assert main([*arguments, "--documents", wide]) == 1
    shown = capsys.readouterr().err
    assert f"[{EvaluationOptionError.code}]" in shown and "same has 32" in shown and "wide has 64" in shown


def test_documents_are_ranked_by_the_document_models_vectors(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    """Queries by one model, documents by the other, not swapped: compared with ranks by hand."""
    folder = tmp_path / "find"
    folder.mkdir()
    queries, documents = sentences[:40], [f"{line[:-1]}, they say." for line in sentences[:200]]
    (folder / "queries.tsv").write_text("id\ttext\n" + "".join(f"q{n}\t{line}\n" for n, line in enumerate(queries)))
    (folder / "corpus.tsv").write_text("id\ttext\n" + "".join(f"d{n}\t{line}\n" for n, line in enumerate(documents)))
    (folder / "relevant.tsv").write_text("query_id\tcorpus_id\n" + "".join(f"q{n}\td{n}\n" for n in range(40)))
    query_model, document_model = tiny("bert"), tiny("bert", layers=2)
    arguments = [
        f"one={query_model}",
        "--pooling",
        "mean",
        "--add",
        f"retrieval:find={folder}",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*arguments, "--precision", "fp32", "--documents", f"other={document_model}"]) == 0
    scores = json.loads((tmp_path / "out" / "evaluation.json").read_text())["scores"]
    found = {(score["set"], score["measure"]): score["values"]["one"] for score in scores}
    models = [Encoder.load(model, pooling="mean") for model in (query_model, document_model)]
    queries_by_first, queries_by_second = (model.encode(queries, normalize=True) for model in models)
    documents_by_first, documents_by_second = (model.encode(documents, normalize=True) for model in models)

    def reciprocal(query_units: np.ndarray, document_units: np.ndarray) -> float:
        cosines = query_units @ document_units.T
        ranks = 1 + (cosines > np.diagonal(cosines)[:, None]).sum(axis=1)
        return float(100 * np.mean(np.where(ranks <= 10, 1 / ranks, 0)))

    expected, swapped = (
        reciprocal(queries_by_first, documents_by_second),
        reciprocal(queries_by_second, documents_by_first),
    )
    assert found["find, documents by other", "mrr@10"] == pytest.approx(expected, abs=1e-3)
    assert found["find", "mrr@10"] == pytest.approx(reciprocal(queries_by_first, documents_by_first), abs=1e-3)
    assert abs(expected - swapped) > 0.1 and abs(expected - found["find", "mrr@10"]) > 0.1


def test_documents_without_retrieval(
    labelled: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = f"m={tiny()}"
    assert main([model, "--pooling", "mean", "--data", str(labelled), "--documents", model]) == 1
    shown = capsys.readouterr().err
    assert f"[{EvaluationOptionError.code}]" in shown and "--documents" in shown and "--add retrieval=FOLDER" in shown


def test_mteb_is_told_which_of_its_tasks_were_in_the_training_text_and_keeps_load_options_apart(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("mteb")
    from distcse.evaluation.mteb import write_results

    options = LoadOptions(pooling="mean", precision="fp32")
    candidate = open_candidate("small", str(tiny()), options)
    seen = ScoredPairs.of("STS-B", read_table(labelled / "sts" / "stsb" / "test.tsv.gz")).unique
    for known, prompt in [(Contamination({}), ""), (Contamination.measure(seen, [seen]), "query: ")]:
        write_results([replace(candidate, contamination=known)], labelled, tmp_path, replace(options, prompt=prompt))
    found = [json.loads(meta.read_text())["training_datasets"] for meta in tmp_path.rglob("model_meta.json")]
    assert sorted(found, key=str) == [None, ["STSBenchmark"]]
