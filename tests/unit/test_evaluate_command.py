"""`python -m distcse evaluate`, called as on the command line: labeled sets, texts without labels, size and speed."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import statistics
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import pearsonr, spearmanr

from distcse import api, evaluate
from distcse.devices.device import DeviceSpeed
from distcse.devices.process import INTERRUPTED
from distcse.errors import (
    DistcseError,
    EncoderSettingError,
    EvaluationDataError,
    EvaluationFormatError,
    EvaluationOptionError,
    EvaluationResultError,
    ModelNotFoundError,
    StoppedEarlyError,
)
from distcse.evaluation import (
    Candidate,
    Choice,
    Ensemble,
    Evaluation,
    Limits,
    LoadOptions,
    ModelInfo,
    TextsTask,
    VectorModel,
    make_ensembles,
    parse_prompts,
    read_table,
)
from distcse.evaluation.bootstrap import PearsonOf
from distcse.evaluation.evaluation import TIMED_TEXTS, measure_speed
from distcse.evaluation.tasks.agreement import MAX_TEXTS
from distcse.events import Event, StageProgress
from distcse.models import Encoder
from distcse.report.progress import JsonView
from distcse.report.verdict import verdict
from tests.commands import command
from tests.failures import fails_with
from tests.labelled import write_retrieval

main = command("evaluate")


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Runs the command with --json; returns what it prints."""

    def run(*words: str) -> list[dict[str, Any]]:
        assert main([*words, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@dataclass(frozen=True)
class Called:
    """A call of the command on two runs of one model and another one, and on ensembles of them."""

    out: Path
    models: list[Path]
    shown: str
    errors: str

    def stored(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "evaluation.json").read_text())
        return found

    def values(self) -> dict[str, float]:
        return next(score["values"] for score in self.stored()["scores"] if score["set"] == "STS-B")


@pytest.fixture(scope="module")
def called(labelled: Path, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Called:
    out = tmp_path_factory.mktemp("evaluate") / "new" / "report"
    models = [tiny(), tiny("minilm"), tiny("bert", width=64)]
    named = [f"{name}={model}" for name, model in zip(("row", "row", "other"), models, strict=True)]
    ensembles = ["--ensemble", "row", "--ensemble", "mix=row,other", "--ensemble", "all"]
    options = f"--suite sts,pairs --data {labelled} --pooling mean --precision fp32 --out {out}".split()
    with redirect_stdout(io.StringIO()) as shown, redirect_stderr(io.StringIO()) as errors:
        assert main([*named, *ensembles, *options]) == 0
    return Called(out, models, shown.getvalue(), errors.getvalue())


def test_one_command_evaluates_and_writes(called: Called) -> None:
    assert "average of 2 of 7" in called.shown and "AUC" in called.shown
    assert f"written {called.out}/report.html" in called.shown
    assert "missing   STS13" in called.errors and "other" in called.errors
    files = {"report.html", "report.md", "evaluation.json", "scores.csv", "scores.tex"}
    assert {file.name for file in called.out.iterdir()} == files
    assert called.stored()["settings"] == {"STS": "all", "device": "cpu", "precision": "fp32"}
    assert [info["pooling"] for info in called.stored()["models"][:3]] == ["mean"] * 3


def test_runs_with_one_name_are_averaged(called: Called) -> None:
    title, values = "STS, mean ± standard deviation over runs", called.values()
    means = called.shown.partition(title)[2].splitlines()
    row, other = (next(line for line in means if line.startswith(f"{name} ")) for name in ("row", "other"))
    runs = [values["row, run 1"], values["row, run 2"]]
    assert f"{statistics.fmean(runs):.2f} ± {statistics.stdev(runs):.2f}" in row
    assert f"{values['other']:.2f}" in other and "±" not in other
    assert called.shown.lstrip().startswith("other ") and "\nCompared with row, run 1." in called.shown
    assert all(title in (called.out / page).read_text() for page in ("report.html", "report.md"))


def test_an_ensemble_is_a_row_with_the_mean_of_its_members_similarities(called: Called, labelled: Path) -> None:
    models, ensembles = called.stored()["models"], ["ensemble of row", "mix", "ensemble"]
    assert [model["name"] for model in models] == ["row, run 1", "row, run 2", "other", *ensembles]
    assert models[3]["source"] == "mean of row, run 1, row, run 2"
    table = read_table(labelled / "sts" / "stsb" / "test.tsv.gz")
    first, second = table.texts("sentence1"), table.texts("sentence2")
    encoders = [Encoder.load(model, pooling="mean") for model in called.models[:2]]
    cosines = [VectorModel.of(encoder).similarities(first, second) for encoder in encoders]
    expected = 100 * float(spearmanr(np.mean(cosines, axis=0), table.numbers("score")).statistic)
    assert called.values()["ensemble of row"] == pytest.approx(expected, abs=1e-6)
    assert called.values()["mix"] == called.values()["ensemble"]


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


@pytest.mark.parametrize(
    ("typed", "one", "two", "run"),
    [
        (["a guitar "], "a guitar ", "a guitar ", "a guitar "),
        (["=a = guitar "], "a = guitar ", "a = guitar ", "a = guitar "),
        (["two=a guitar "], "", "a guitar ", ""),
        (["a guitar ", "one=", "row=b"], "", "a guitar ", "b"),
    ],
)
def test_a_prompt_is_for_all_models_or_for_one_and_its_runs(typed: list[str], one: str, two: str, run: str) -> None:
    names = ["one", "two", "row, run 1", "row, run 2"]
    prompts = parse_prompts(typed, names)
    options = LoadOptions(prompt=prompts.get("", ""), prompts=prompts, role_prompts={"query": prompts})
    assert [options.prompt_of(name) for name in names] == [one, two, run, run]
    assert [options.role_prompts_of(name).get("query", "") for name in names] == [one, two, run, run]


def test_prompts_are_put_before_the_sentences_of_their_models(
    labelled: Path, tiny: Callable[..., Path], printed: Callable[..., list[dict[str, Any]]]
) -> None:
    arguments = [f"one={tiny()}", f"two={tiny('bert', width=64)}", "--data", str(labelled), "--suite", "sts"]

    def scores(*prompts: str) -> dict[str, float]:
        lines = printed(*arguments, "--pooling", "mean", "--precision", "fp32", *prompts)
        values: dict[str, float] = next(line["values"] for line in lines if line.get("set") == "STS-B")
        return values

    plain, both = scores(), scores("--prompt", "a guitar ")
    assert plain["one"] != both["one"] and plain["two"] != both["two"]
    assert scores("--prompt", "two=a guitar ") == {"one": plain["one"], "two": both["two"]}


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
    for module in ("distcse.runs.measurement", "distcse.evaluation.candidates"):
        monkeypatch.setattr(f"{module}.speed_of", lambda name: device)
    chosen = "bf16" if speedup > 1 else "fp32"
    arguments = f"{tiny()} --data {labelled} --suite sts --pooling mean".split()
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["settings"]["precision"] == chosen
    assert f"{chosen}: models (a CPU: bf16 products {speedup:g}x as fast as fp32)" in capsys.readouterr().err
    assert main([*arguments, "--precision", "bf16", "--dry-run"]) == 0
    assert ("precision: bf16" in capsys.readouterr().err) == (chosen == "fp32")  # the warning names the key


@pytest.mark.parametrize(("stopped", "stops_in"), [("first", "texts"), ("second", "texts"), ("second", "sets")])
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
    options = f"--suite sts,pairs --data {labelled} --pooling mean --out {tmp_path} --json".split()
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


def test_tables_are_printed_if_the_report_cannot_be_written(
    labelled: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.html").mkdir()  # so that the file cannot be written
    assert main(f"{tiny()} --data {labelled} --suite sts --pooling mean --out {tmp_path}".split()) == 1
    shown = capsys.readouterr()
    assert "average of 2 of 7" in shown.out and "report.html" in shown.err


def test_unknown_choices_and_no_models_are_refused(labelled: Path, tiny: Callable[..., Path]) -> None:
    with fails_with(EvaluationOptionError, "aggregate", "'weighted'", "all, mean, wmean"):
        api.evaluate([str(tiny())], labelled, aggregate="weighted")
    with fails_with(EvaluationOptionError, "model"):
        api.evaluate({}, labelled)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ("nowhere --add sts={data}/sts/stsb/test.tsv.gz", ModelNotFoundError, "nowhere"),
        ("{tiny} --data {data}/nowhere", EvaluationDataError, "{data}/nowhere"),
        ("{tiny}", EncoderSettingError, "pooling"),
        ("a={tiny} a={tiny}", EvaluationOptionError, "name a"),
        ("ab={tiny} b={tiny} --against a", EvaluationOptionError, "did you mean 'ab'?; the models are ab, b"),
        ("{tiny} --out /proc/no", EvaluationResultError, "/proc/no"),
        ("{mean} --max-mb 0", EvaluationOptionError, "above 0"),
        ("{mean} --max-ms nan", EvaluationOptionError, "above 0"),
        ("{mean} --suite geometry --max-ms 9", EvaluationOptionError, "--suite sts,"),
        ("{mean} --documents m={tiny}", EvaluationOptionError, "--add retrieval=FOLDER"),
        ("{mean} --quantize int8", EvaluationOptionError, "--add retrieval=FOLDER"),
        ("{mean} --suite retrieval --dimensions 32", EvaluationOptionError, "more than 32"),
        ("{mean} --dimensions 0", EvaluationOptionError, "above 0"),
        ("{mean} two={tiny} --prompt tow=x", EvaluationOptionError, "did you mean 'two'"),
        ("{mean} --prompt m=x --prompt m=y", EvaluationOptionError, "two prompts"),
        ("{mean} --prompt x --prompt y", EvaluationOptionError, "all models"),
        ("m={cross} --prompt m=x", EvaluationOptionError, "cross-encoder, which reads texts without"),
    ],
)
def test_errors_are_one_line_with_a_code(
    arguments: str,
    error: type[DistcseError],
    named: str,
    labelled: Path,
    tiny: Callable[..., Path],
    tiny_cross: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"data": labelled, "tiny": tiny(), "cross": tiny_cross, "mean": f"--pooling mean m={tiny()}"}
    assert main(["--data", str(labelled), *arguments.format(**places).split()]) == (
        2 if error is EncoderSettingError else 1
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("distcse: ")]
    assert len(lines) == 1 and f"[{error.code}]" in lines[0] and named.format(data=labelled) in lines[0]


def test_the_best_model_within_limits_is_named(
    labelled: Path, tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model is timed on the sets' own sentences, and one row of several models, which has no size, is not chosen."""
    models = f"wide={tiny('bert', width=64)} thin={tiny('bert')} --ensemble both=wide,thin"
    arguments = f"{models} --data {labelled} --pooling mean --suite geometry,sts".split()
    assert main([*arguments, "--max-ms", "1e6", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (choice,) = (event for event in events if event["event"] == "Choice")
    timed = {event["name"]: event for event in events if event["event"] == "Model"}
    assert choice["name"] in ("wide", "thin") and (choice["suite"], choice["set"]) == ("sts", "average of 2 of 7")
    assert timed["wide"]["latency_ms"] > 0 and timed["thin"]["size_bytes"] < timed["wide"]["size_bytes"]
    assert main([*arguments, "--max-ms", "1e-6", "--max-mb", "1000"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    named = "no model with a score in sts average of 2 of 7 is within 1e-06 ms and 1000 MB: the fastest takes"
    assert line.startswith(named) and "the smallest has" in line


def test_the_choice_has_the_best_score_among_the_models_that_keep_the_limits(evaluation: Evaluation) -> None:
    def with_needs(needs: dict[str, tuple[float, int]], values: dict[str, float]) -> Evaluation:
        models = [replace(m, latency_ms=needs[m.name][0], size_bytes=needs[m.name][1]) for m in evaluation.models]
        scores = [replace(s, values=values) if s.suite == "sts" and s.average else s for s in evaluation.scores]
        return replace(evaluation, models=models, scores=scores)

    needs = {"wide": (2.0, 9_000_000), "thin": (1.0, 3_000_000), "cross": (8.0, 4_000_000)}
    values = {"wide": 70.0, "thin": 50.0, "cross": 90.0}
    expected = {(None, 9.0): "cross", (8.0, None): "cross", (2.0, None): "wide", (2.0, 9.0): "wide", (9.0, 3.5): "thin"}
    for (ms, mb), name in expected.items():
        choice = Choice.of(with_needs(needs, values), Limits(ms, mb))
        assert choice is not None and choice.model is not None and choice.model.name == name
        assert str(choice).startswith(f"best within {Limits(ms, mb)}: {name}, sts average")
    assert Choice.of(with_needs(needs, values), Limits()) is None
    shown = with_needs(dict.fromkeys(needs, (6.04, 80_040_000)), values)
    for limits, is_kept in ((Limits(6.04, 80.04), True), (Limits(6), False), (Limits(mb=80), False)):
        assert bool((kept := Choice.of(shown, limits)) and kept.model) == is_kept, limits
    nothing = Choice.of(with_needs(needs, {"wide": 70.0, "cross": math.nan}), Limits(1.5))
    assert nothing is not None and nothing.model is None
    assert str(nothing).endswith("the fastest takes 2.0 ms, the smallest has 9.0 MB"), "of the models with a score"


def test_documents_are_ranked_by_the_document_models_vectors(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Queries by one model, documents by the other, not swapped: compared with ranks by hand."""
    queries, documents = sentences[:40], [f"{line[:-1]}, they say." for line in sentences[:200]]
    write_retrieval(tmp_path, queries, documents)
    models = [tiny("bert"), tiny("bert", layers=2)]
    options = f"--pooling mean --precision fp32 --add retrieval:find={tmp_path} --out {tmp_path}".split()
    assert main([f"one={models[0]}", *options, "--documents", f"other={models[1]}"]) == 0
    assert "find, documents by other" in capsys.readouterr().out
    scores = json.loads((tmp_path / "evaluation.json").read_text())["scores"]
    found = {(score["set"], score["measure"]): score["values"]["one"] for score in scores}
    encoders = [Encoder.load(model, pooling="mean") for model in models]
    by_query = [encoder.encode(queries, normalize=True) for encoder in encoders]
    by_document = [encoder.encode(documents, normalize=True) for encoder in encoders]

    def reciprocal(query: int, document: int) -> float:
        cosines = by_query[query] @ by_document[document].T
        ranks = 1 + (cosines > np.diagonal(cosines)[:, None]).sum(axis=1)
        return float(100 * np.mean(np.where(ranks <= 10, 1 / ranks, 0)))

    assert found["find, documents by other", "mrr@10"] == pytest.approx(reciprocal(0, 1), abs=1e-3)
    assert found["find", "mrr@10"] == pytest.approx(reciprocal(0, 0), abs=1e-3)
    assert min(abs(reciprocal(0, 1) - reciprocal(*others)) for others in ((1, 0), (0, 0))) > 0.1
    assert main([f"one={models[0]}", *options, "--documents", f"wide={tiny('bert', width=64)}"]) == 1
    error = capsys.readouterr().err
    assert f"[{EvaluationOptionError.code}]" in error and "one has 32" in error and "wide has 64" in error


def test_retrieval_is_measured_again_with_fewer_dimensions_and_quantized_vectors(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """nDCG by hand of each format's scores of all documents."""
    documents = list(dict.fromkeys(sentences))[:120]
    queries = [f"{line[:-1]}, they say." for line in documents[:40]]
    write_retrieval(tmp_path, queries, documents)
    models = [f"one={tiny('bert')}", f"teacher={tiny('bert', width=64)}"]
    options = f"--pooling mean --precision fp32 --add retrieval:find={tmp_path} --out {tmp_path}".split()
    assert main([*models, *options, "--dimensions", "12", "32", "--quantize", "binary", "int8", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {event["measure"]: event["values"] for event in events if event["event"] == "Score"}
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    whole = [encoder.encode(texts, normalize=True) for texts in (queries, documents)]
    first = [each[:, :12] / np.linalg.norm(each[:, :12], axis=1, keepdims=True) for each in whole]
    bytes_of = {"one": 128, "one, int8": 32, "one, binary": 4}
    bytes_of |= {"one, 12 dimensions": 48, "one, 12 dimensions, int8": 12, "one, 12 dimensions, binary": 2}
    for name, size in bytes_of.items():
        ours, theirs = first if "12" in name else whole
        scores = ours @ theirs.T
        if "int8" in name:
            low, step = theirs.min(axis=0), np.ptp(theirs, axis=0) / 255
            scores = ours @ (low + step * np.clip(np.floor((theirs - low) / step), 0, 255)).T
        if "binary" in name:
            scores = -((ours[:, None] > 0) != (theirs[None] > 0)).sum(axis=2)
        ranks = [(row >= row[place]).sum() for place, row in enumerate(scores)]
        ndcg = np.mean([1 / np.log2(rank + 1) if rank <= 10 else 0 for rank in ranks])
        assert found["ndcg@10"][name] == pytest.approx(100 * ndcg, abs=1e-3), name
        assert found["bytes"][name] == size
    assert len({*(found["ndcg@10"][name] for name in bytes_of)}) > 3
    assert found["bytes"]["teacher, 32 dimensions, int8"] == 32 and "one, 32 dimensions" not in found["bytes"]
    assert len(found["bytes"]) == 6 + 9
    assert main([*models, *options, "--quantize", "int8"]) == 0
    shown = capsys.readouterr().out
    assert "one, int8" in shown and "  bytes" in shown and "difference from teacher and" in shown


OPTIONS = LoadOptions(pooling="mean", precision="fp32")


@pytest.fixture
def texts(tmp_path: Path, sentences: list[str]) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join([*sentences[:120], "", sentences[0]]))
    return file


def test_the_scores_are_those_of_a_direct_computation(
    texts: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    models = {"student": tiny("bert"), "teacher": tiny("minilm")}
    evaluation = evaluate(models, texts=texts, load_options=OPTIONS).evaluation
    found = {score.measure: dict(score.values) for score in evaluation.scores}
    distinct = list(dict.fromkeys(sentences[:120]))
    vectors = [Encoder.load(model, pooling="mean").encode(distinct, normalize=True) for model in models.values()]
    draw = np.random.default_rng(1)
    first = draw.integers(0, len(distinct), 5000)
    second = (first + draw.integers(1, len(distinct), 5000)) % len(distinct)
    assert (first != second).all()
    ours, theirs = ((each[first] * each[second]).sum(axis=1) for each in vectors)
    assert found["pearson"] == {"student": pytest.approx(100 * pearsonr(ours, theirs).statistic, abs=1e-3)}
    assert found["spearman"] == {"student": pytest.approx(100 * spearmanr(ours, theirs).statistic, abs=1e-2)}
    for number in (1, 10):
        one, other = ([set(row[1 : 1 + number]) for row in np.argsort(-each @ each.T).tolist()] for each in vectors)
        shared = np.mean([len(a & b) / number for a, b in zip(one, other, strict=True)])
        assert found[f"kept@{number}"] == {"student": pytest.approx(100 * shared)}


def test_one_command_shows_agreement_size_and_speed(
    texts: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [f"student={tiny('bert')}", f"teacher={tiny('minilm')}"]
    arguments = [*models, "--texts", str(texts), "--pooling", "mean", "--precision", "fp32"]
    assert main([*arguments, "--out", str(tmp_path / "report"), "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    sizes = {event["name"]: event for event in events if event["event"] == "Model"}
    for name, kind in (("student", "bert"), ("teacher", "minilm")):
        weights = list(Encoder.load(tiny(kind), pooling="mean").parameters())
        assert sizes[name]["size_bytes"] == 4 * sizes[name]["parameters"] == sum(4 * w.numel() for w in weights)
        assert sizes[name]["sentences_per_s"] > 0 and sizes[name]["latency_ms"] > 0
    assert (sizes["student"]["dimensions"], sizes["teacher"]["dimensions"]) == (32, 48)
    assert "kept@10" in (tmp_path / "report" / "report.md").read_text()
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "Agreement on texts, texts.txt, with teacher" in shown and "sentences/s" in shown and "kept@k: %" in shown
    assert "difference from" not in shown  # the teacher has no row
    assert main(arguments[1:]) == 0
    alone = capsys.readouterr().out
    assert "Size and speed" in alone and "Agreement" not in alone
    kept, size = (
        next(e for e in events if e.get("measure") == "kept@10")["values"]["student"],
        sizes["student"]["size_bytes"],
    )
    line = rf"student keeps {kept:.1f} % \[[\d.]+, [\d.]+\] of the teacher's ten nearest neighbors, [\d.]+x as fast, "
    assert re.match(rf"\n{line}{size / 1e6:.1f} MB(.*)?\nCompared with teacher. In brackets: 95 % intervals", shown)


def test_all_tables_compare_with_the_same_model(
    texts: Path, labelled: Path, tiny: Callable[..., Path], tiny_cross: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that is named, or called teacher, or the last that begins so, or the first; a cross-encoder has no neighbors."""
    options = ["--texts", str(texts), "--data", str(labelled), "--suite", "sts", "--pooling", "mean"]
    for names, against, reference in (
        (("student", "teacher"), [], "teacher"),
        (("teacher one", "teacher two"), [], "teacher two"),
        (("a", "b"), [], "a"),
        (("teacher", "b"), ["--against", "b"], "b"),
    ):
        models = [f"{name}={model}" for name, model in zip(names, (tiny("bert"), tiny_cross), strict=True)]
        assert main([*models, *options, *against, "--precision", "fp32"]) == 0
        shown = capsys.readouterr().out
        assert f"Agreement on texts, texts.txt, with {reference}" in shown and "kept@10" not in shown
        assert f"difference from {reference} and" in shown and f"\nCompared with {reference}." in shown


def test_the_verdict_of_several_runs_has_their_mean_and_standard_deviation(called: Called) -> None:
    """Whichever the model is that they are compared with; a run of that name has no line."""
    evaluation, values = Evaluation.read(called.out / "evaluation.json"), called.values()
    average = next(score for score in evaluation.scores if score.average and score.suite == "sts").values
    shares = [100 * average[f"row, run {number}"] / average["other"] for number in (1, 2)]
    found = verdict(replace(evaluation, base="other"))["row"]
    assert values.keys() == average.keys()
    assert f" {statistics.fmean(shares):.1f} ± {statistics.stdev(shares):.1f} % of other's STS Spearman" in found
    assert "row" not in verdict(evaluation) and "other" in verdict(evaluation)


def test_the_reference_can_be_chosen(texts: Path, tiny: Callable[..., Path]) -> None:
    models = {"student": tiny("bert", width=64), "teacher": tiny("bert")}
    measured = evaluate(models, texts=texts, limits=Limits(mb=1e3), load_options=OPTIONS)
    sizes = {info.name: info.size_bytes / 1e6 for info in measured.evaluation.models}
    choice = Choice.of(measured.evaluation, Limits(mb=sizes["teacher"]))
    assert sizes["teacher"] < sizes["student"]
    assert choice is not None and choice.model is not None and choice.model.name == "teacher"


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    models = {"student": tiny("bert"), "teacher": tiny("minilm")}
    few, table = tmp_path / "few.txt", tmp_path / "table.jsonl"
    few.write_text("one\ntwo\none\n")
    table.write_text("".join(json.dumps({"body": f"text {number}"}) + "\n" for number in range(20)))
    with fails_with(EvaluationDataError, "missing.txt"):
        evaluate(models, texts=tmp_path / "missing.txt", load_options=OPTIONS)
    with fails_with(EvaluationFormatError, "few.txt", "2 distinct texts", "at least 12"):
        evaluate(models, texts=few, load_options=OPTIONS)
    with fails_with(EvaluationFormatError, "table.jsonl", "--column"):
        evaluate(models, texts=table, load_options=OPTIONS)
    assert len(TextsTask.of((table, "body"), None).texts) == 20


def test_of_many_texts_the_same_ones_are_drawn_each_time(tmp_path: Path) -> None:
    file = tmp_path / "many.txt"
    file.write_text("\n".join(f"text {number}" for number in range(MAX_TEXTS + 500)))
    drawn = [TextsTask.of((file, "text"), "teacher").texts for _ in range(2)]
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == MAX_TEXTS


def test_speed_counts_texts_of_full_calls_and_of_single_ones() -> None:
    batches: list[int] = []

    def compute(texts: Sequence[str]) -> None:
        batches.append(len(texts))

    speed = measure_speed(compute, [f"text {number}" for number in range(500)])
    assert {*batches} == {TIMED_TEXTS, 1} and speed.sentences_per_s > 0 and speed.latency_ms > 0


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_pearson_and_its_resamples(noise: float) -> None:
    draw = np.random.default_rng(3)
    gold: NDArray[np.float64] = draw.standard_normal(200)
    estimate = PearsonOf(gold + noise * draw.standard_normal(200), gold, "items")
    assert estimate.value == pytest.approx(100 * pearsonr(estimate.predicted, gold).statistic)
    assert estimate.resampled.mean() == pytest.approx(estimate.value, abs=1)
    assert PearsonOf(np.ones(200), gold, "items").value == 0
