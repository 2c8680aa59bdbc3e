"""Every operation that can take more than five seconds ends at a stop request within one more batch or shard.

`ASKS` lists the places that ask; a place that is missing there fails, and so does a call of a loop over batches that asks nobody.
Tests on Ray: `tests/faults/test_kills.py`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from subprocess import PIPE
from typing import Any

import pytest

import distcse
from distcse.devices.process import INTERRUPTED, StopOnSignal, exit_status
from distcse.errors import StoppedEarlyError
from distcse.evaluation import Contamination, RetrievalDataset, RetrievalTask, Tasks
from distcse.events import DevScore, Event, GroupEvent, Reporter, StageProgress, StepReport
from distcse.models import Encoder, EncoderHandle
from distcse.recipe import MutualRecipe, RankInferenceSection, Recipe, read_recipe, recipe_yaml
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.dev_ensemble import score_ensemble
from distcse.runs.distillation.distillation_task import DistillationTask
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.final_evaluation import (
    ScoredStudent,
    contamination_of,
    final_scores,
    labelled_tasks,
    rank_inference_call,
)
from distcse.runs.distillation.precompute import prepare_tables, prepare_tokens
from distcse.runs.distillation.preflight import embed_corpus
from distcse.runs.experiment import experiment_of
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.storage import open_store
from distcse.teachers.comparison import compare
from distcse.text import Corpus
from distcse.training.step_log import stop_of_score
from tests.commands import TRAIN, user_environment
from tests.conftest import ROOT
from tests.failures import fails_with
from tests.jobs import embed_tables
from tests.pairs import make_mutual_recipe
from tests.weights import assert_equal_weights, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]

UNITS = {
    "distcse.models.frozen_pass.padded": 1,
    "distcse.text.token_table.encode_batch": 1,
    "distcse.text.ragged.RaggedWriter.append": 1,
    "distcse.text.ragged.RaggedWriter.append_rows": 1,
    "distcse.evaluation.contamination.normalized_key": 16,
    "distcse.evaluation.tasks.transfer._regression": 1,
    "distcse.teachers.table.EmbeddingTable.is_intact": 8,
    "faiss.IndexFlatIP.search": 1,
    "model2vec.train.base.BaseFinetuneable.forward": 1,
}
"""Functions that compute one batch or shard, or one of its parts, and how many calls are at most between two questions."""
SMALL = {
    "distcse.text.token_table.CHUNK": 16,
    "distcse.text.corpus.CHUNK": 16,
    "distcse.text.pairs.CHUNK": 4,
    "distcse.events.CHUNK": 16,
    "distcse.text.vector_index.BLOCK_ROWS": 16,
    "distcse.models.static.TOKENS_PER_BATCH": 16,
    "distcse.runs.distillation.precompute.PART_ROWS": 100,
}


class Work:
    """Counts batches, and requests a stop in the middle of one.

    Args:
        patch: Replaces the functions that compute batches.
        stage: Count the batches of this stage. Default: all.
        after: Batches after which the stop is requested.
    """

    def __init__(self, patch: pytest.MonkeyPatch, stage: str | None = None, after: int = 2) -> None:
        self.before, self.afterwards, self.events = 0, 0, list[Event]()
        self.allowed = 0
        self._stage, self._after, self.current = stage, after, ""
        for name, size in SMALL.items():
            patch.setattr(name, size)
        patch.setattr("distcse.models.frozen_pass.by_length", lambda ids, *_: _in_batches(len(ids)))
        for name, calls in UNITS.items():
            patch.setattr(name, self._counted(resolve_name(name), calls))

    @property
    def requested(self) -> bool:
        return self.before >= self._after

    @property
    def reporter(self) -> Reporter:
        return Reporter(self._note, lambda: self.requested)

    def _note(self, event: Event) -> None:
        self.events.append(event)
        inner = event.event if isinstance(event, GroupEvent) else event
        if isinstance(inner, StageProgress):
            self.current = inner.name

    def _counted(self, function: Callable[..., Any], calls: int) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if self.requested:
                self.afterwards += 1
            elif self._stage in (None, self.current):
                self.before += 1
                self.allowed = calls
            return function(*arguments, **named)

        return counted

    def stops(self, operation: Callable[[Reporter], Any]) -> str:
        """Check that an operation ends within one more batch, and only because it asks. Returns its message."""
        with pytest.raises(StoppedEarlyError) as stopped:
            operation(self.reporter)
        assert self.requested and self.afterwards <= self.allowed
        return str(stopped.value)


def _in_batches(texts: int) -> list[list[int]]:
    return [list(range(begin, min(begin + 4, texts))) for begin in range(0, texts, 4)]


VECTORS = ("objective={regression: {form: cosine}}", "student.projection=none", "evaluation.final_suites=[]")


def test_a_stop_before_training_ends_the_run_at_once(recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each stage in turn: a later start has what the earlier ones stored."""
    recipe = recipe_with("corpus.limit=120", *VECTORS)
    for number, stage in enumerate(["corpus", "tokens", "teacher 0", "teacher 1", "targets"], start=1):
        with monkeypatch.context() as patch:
            work = Work(patch, stage)
            message = work.stops(lambda reporter: Distillation(recipe).run(LocalBackend(), reporter))
        runs = [*Path(recipe.storage.runs).iterdir()]
        assert len(runs) == number and message.rpartition("--resume ")[2] in map(str, runs), stage
        assert not any((run / "model").exists() for run in runs)
        assert not any(isinstance(event, StepReport) for event in work.events)


def test_a_stop_in_a_dev_score_ends_it_and_the_resumed_run_computes_it(
    recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first score is the initial model's, the third the last step's."""
    changes = ("evaluation.final_suites=[]", "student.dropout=0.1", "training.max_steps=4", "evaluation.eval_steps=2")
    recipe, make = recipe_with(*changes), DistillationTask.evaluate
    undisturbed = distcse.run(recipe, listen=lambda event: None).directory
    for score in (1, 2, 3):
        before = {*Path(recipe.storage.runs).iterdir()}
        with monkeypatch.context() as patch:
            work, numbers = Work(patch, f"score {score}"), count(1)

            def made(*arguments: Any, work: Work = work, numbers: Iterator[int] = numbers) -> Any:
                work.current = f"score {next(numbers)}"
                return make(*arguments)

            patch.setattr(DistillationTask, "evaluate", made)
            with suppress(StoppedEarlyError):  # in the first score there is no model yet
                Distillation(recipe).run(LocalBackend(), work.reporter)
        assert work.requested and work.afterwards <= 1
        assert sum(isinstance(event, DevScore) for event in work.events) == score - 1
        (run,) = {*Path(recipe.storage.runs).iterdir()} - before
        done = distcse.resume(run, listen=lambda event: None)
        assert not done.interrupted
        assert_equal_weights(weights_of(run), weights_of(undisturbed))
        assert dev_scores(run) == dev_scores(undisturbed)


def _batches_of_a_stopped_score(model: Path, texts: list[str]) -> int:
    """In a worker: count the batches of a dev score in which rank 0 hears a stop after the third."""
    encoder, batches, asked = Encoder.load(model, pooling="mean"), list[int](), count(1)
    reporter = Reporter(stop_requested=lambda: next(asked) == 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distcse.models.frozen_pass.by_length", lambda ids, *_: _in_batches(len(ids)))
        encoder.register_forward_hook(lambda *_: batches.append(1))
        with pytest.raises(StoppedEarlyError):
            encoder.encode(texts, precision="fp32", on_progress=stop_of_score(reporter))
    return len(batches)


def test_workers_that_score_the_same_texts_stop_after_the_same_batch(
    tiny: Callable[..., Path], sentences: list[str]
) -> None:
    assert run_workers(_batches_of_a_stopped_score, 2, tiny("bert"), sentences[:40]) == [3, 3]


def dev_scores(run: Path) -> list[list[float]]:
    """Return the steps and dev scores of a run in order."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [[event["step"], event["score"]] for event in events if event["event"] == "DevScore"]


def test_what_a_stopped_pass_has_stored_is_kept(recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_with("evaluation.final_suites=[]", "teachers.shard_rows=20")
    with monkeypatch.context() as patch:
        Work(patch, "teacher 0", after=12).stops(lambda reporter: embed_corpus(recipe, LocalBackend(), reporter))
    table = next(Path(recipe.storage.cache).glob("tables/*/shard-*.json")).parent
    before = {file.name: file.stat().st_mtime_ns for file in table.glob("shard-*.json")}
    assert len(before) == 2  # 12 batches of 4 rows
    embed_corpus(recipe, LocalBackend(), Reporter())
    assert all((table / name).stat().st_mtime_ns == written for name, written in before.items())


@pytest.fixture
def corpus_of(recipe_with: MakeRecipe) -> Callable[..., tuple[Recipe, Corpus]]:
    def prepare(*overrides: str) -> tuple[Recipe, Corpus]:
        recipe = recipe_with(*overrides)
        return recipe, Corpus.prepare(recipe.corpus, open_store(recipe.storage.cache))

    return prepare


Operation = Callable[..., Callable[[Reporter], Any]]


def verify_shards(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    recipe, corpus = corpus_of("teachers.shard_rows=20")
    embed_tables(recipe, corpus)
    return lambda reporter: prepare_tables(recipe, corpus, LocalBackend(), reporter)


def tokenize_parts(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    recipe, corpus = corpus_of()
    return lambda reporter: prepare_tokens(recipe, corpus, LocalBackend(), reporter)


def compare_teachers(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    recipe, corpus = corpus_of()
    return lambda reporter: compare(recipe, corpus, 100, reporter)


def score_teachers(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    recipe, _ = corpus_of(f"evaluation.data={labelled}", "evaluation.dev=stsb")
    return lambda reporter: score_ensemble(recipe, False, reporter)


def measure_student(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    recipe, corpus = corpus_of("evaluation.final_suites=[sts]", f"evaluation.data={labelled}", "evaluation.dev=none")
    encoder = EncoderHandle(partial(Encoder.from_section, recipe.student))
    return final_evaluation(recipe, corpus, [ScoredStudent("start", recipe.student.backbone, encoder)])


def measure_cross_encoder(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    """Its similarities of each two held-out texts."""
    recipe, corpus = corpus_of(f"teachers.encoders=[{{backbone: '{cross}'}}]", "evaluation.final_suites=[agreement]")
    return final_evaluation(recipe, corpus, [])


def final_evaluation(recipe: Recipe, corpus: Corpus, students: list[ScoredStudent]) -> Callable[[Reporter], Any]:
    directory, tasks = RunDirectory.create(recipe), labelled_tasks(recipe)

    def measure(reporter: Reporter) -> None:
        scores = final_scores(recipe, corpus, tasks, students, directory, LocalBackend(), reporter)
        assert scores.stopped and scores.evaluation is None
        raise StoppedEarlyError("as a result")

    return measure


def measure_ranks(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    recipe, corpus = corpus_of()
    student, section = EncoderHandle(partial(Encoder.from_section, recipe.student)), RankInferenceSection()
    folder, known, backend = open_store(tmp / "ranker"), Contamination({}), LocalBackend()
    call = rank_inference_call(recipe, section, corpus, student, folder, known, "fp32", Tasks(), backend)
    return call.function


def find_contamination(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    recipe, corpus = corpus_of()
    task = RetrievalTask("few", RetrievalDataset(["a"], ["b"], [{0: 1.0}], [None]))
    return lambda reporter: contamination_of(recipe, corpus, Tasks([task]), reporter)


def train_static(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    recipe, _ = corpus_of(*VECTORS, "student.layers=null", "training.max_steps=2", "training.batch_size=8")
    (tmp / "student.yaml").write_text(recipe_yaml(recipe))
    family = read_recipe(str(tmp / "student.yaml"), ["family=[{layers: 2}, {static: true}]"])

    def train(reporter: Reporter) -> None:
        done = experiment_of(family).run(LocalBackend(), reporter)
        assert done.interrupted and list(done.models) == ["2-layers"]
        raise StoppedEarlyError("as a result")

    return train


def measure_models(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    """The command `evaluate`."""
    return measurement(tmp, corpus_of, data=labelled)


def fit_transfer(tmp: Path, corpus_of: Any, labelled: Path, cross: Path) -> Any:
    (tmp / "transfer.tsv").write_text("label\ttext\n" + "".join(f"{n % 2}\tword {n}\n" for n in range(300)))
    return measurement(tmp, corpus_of, add=[f"transfer={tmp / 'transfer.tsv'}"])


def measurement(tmp: Path, corpus_of: Any, **sets: Any) -> Callable[[Reporter], Any]:
    recipe, _ = corpus_of()
    Encoder.from_section(recipe.student).save(tmp / "model")
    models = [f"one={tmp / 'model'}"]
    return lambda reporter: distcse.evaluate(
        models, **sets, listen=reporter.emit, stop_requested=reporter.stop_requested
    )


@pytest.mark.parametrize(
    ("operation", "stage"),
    [
        (verify_shards, None),
        (tokenize_parts, None),
        (compare_teachers, None),
        (score_teachers, None),
        (measure_student, "start"),
        (measure_cross_encoder, None),
        (measure_ranks, None),
        (find_contamination, None),
        (measure_models, None),
        pytest.param(train_static, "static", marks=pytest.mark.slow),
        pytest.param(fit_transfer, "transfer fits", marks=pytest.mark.slow),
    ],
)
def test_an_operation_stops_in_its_middle(
    operation: Operation,
    stage: str | None,
    tmp_path: Path,
    corpus_of: Any,
    labelled: Path,
    tiny_cross: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = operation(tmp_path, corpus_of, labelled, tiny_cross)
    Work(monkeypatch, stage).stops(begin)


@pytest.fixture
def groups(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Callable[..., MutualRecipe]:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, *overrides)


@pytest.mark.parametrize("stages", [("pairs", "starts", "tokens"), ("mining",)])
def test_a_stop_before_the_first_phase_ends_the_run_at_once(
    stages: tuple[str, ...],
    groups: Callable[..., MutualRecipe],
    tmp_path: Path,
    sentences: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(sentences))
    source = f"pairs={{mine: {{corpus: {{path: '{tmp_path / 'corpus.txt'}'}}, pairs: 100, num_neighbors: 5}}}}"
    recipe = groups(*([source] if "mining" in stages else []))
    for stage in stages:
        with monkeypatch.context() as patch:
            work = Work(patch, stage)
            work.stops(lambda reporter: MutualDistillation(recipe).run(LocalBackend(), reporter))
        assert not any(isinstance(event, GroupEvent) for event in work.events)


@pytest.mark.parametrize("mined", [False, True])
def test_a_stop_ends_the_reading_of_a_sweeps_or_a_reruns_data(
    mined: bool, groups: Callable[..., MutualRecipe], tmp_path: Path, sentences: list[str]
) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(sentences))
    recipe = groups(*([f"pairs={{mine: {{corpus: {{path: '{tmp_path / 'corpus.txt'}'}}}}}}"] if mined else []))
    stopped = Reporter(stop_requested=lambda: True)
    with fails_with(StoppedEarlyError, "corpus" if mined else "pairs"):
        experiment_of(recipe).trials.prepare(LocalBackend(), stopped, RunDirectory(tmp_path / "sweep"))
    with pytest.raises(StoppedEarlyError):
        experiment_of(recipe).fingerprints(stopped)


def test_commands_exit_with_the_status_of_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    def stop() -> int:
        Reporter(stop_requested=lambda: True).check_stop("in a test")
        return 0

    assert exit_status(stop, kept="all") == INTERRUPTED
    assert capsys.readouterr().err.startswith("distcse: [DCSE-X17] stopped in a test; ")
    assert exit_status(lambda: os.kill(os.getpid(), signal.SIGTERM) or 0, kept="all") == INTERRUPTED  # type: ignore[func-returns-value]
    assert "stopped at once; all" in capsys.readouterr().err


ASKS = {
    "test_a_stop_before_training_ends_the_run_at_once": """
        runs/distillation/corpus:read_corpus runs/distillation/precompute:prepare_tables
        runs/distillation/precompute:prepare_tokens runs/distillation/preparation:_fit_projection""",
    "test_an_operation_stops_in_its_middle": """
        evaluation/evaluation:measure_model evaluation/evaluation:_reporting_search evaluation/evaluation:_measure_formats
        runs/distillation/precompute:_verifying runs/distillation/precompute:_write_part
        runs/distillation/dev_ensemble:DevEnsemble.of runs/distillation/final_evaluation:_measure_student
        runs/distillation/final_evaluation:_measure_teacher runs/distillation/final_evaluation:_measure_ranks
        runs/distillation/final_evaluation:contamination_of runs/mutual/final_evaluation:contamination_of
        runs/family/experiment:Family.run runs/family/experiment:_train_static runs/measurement:_candidate
        runs/measurement:_add_retrieval_with_documents_by teachers/comparison:compare tuning/final_evaluation:_measure""",
    "test_a_stop_before_the_first_phase_ends_the_run_at_once": """
        runs/mutual/mining:prepare_mining runs/mutual/mining:_mine_bands runs/mutual/mining:_mine_bm25
        runs/mutual/pairs:read_pairs runs/mutual/pairs:_prepare runs/mutual/preflight:_score""",
    "test_candidates.py": """
        runs/distillation/precompute:_find_candidates runs/distillation/precompute:_write_scores
        teachers/candidates:CandidateSearch._nearest teachers/candidates:CandidateSearch._sharing_words
        teachers/candidates:CandidateSearch._write_lists""",
    "test_stopped_evaluation.py": "runs/backend:LocalBackend.run_on_devices runs/mutual/final_evaluation:_measure",
    "test_mutual_stopped.py": "runs/mutual/group:LocalGroup.score",
    "test_worker_pool.py": "runs/mutual/group:WorkerPool._wait_for_slots",
    "test_pairs.py": "text/bm25:BM25Index.build text/bm25:_Followed.__iter__",
    "test_lease.py": "runs/lease:_wait runs/lease:_local_lock",
    "tests/cluster/test_sweep.py": "cluster/tune:TrialListener.on_step_end",
    "tests/faults/test_kills.py": """
        cluster/embedding_actors:_EmbeddingTasks._check cluster/teacher_servers:co_located_servers
        cluster/train_workers:_run_trainer""",
    "tests/faults/test_mutual_kills.py": "cluster/ray_group:RayGroup._check_wait cluster/ray_group:RayGroup._retry",
    "none: a signal ends the command at once, and a job continues": "cli/jobs:_submit cli/jobs:_follow cli/jobs:_logs",
    "none: a signal ends `distcse data` at once, and complete sets stay": """
        evaluation/conversion:convert evaluation/downloads:_download""",
    "none: they ask for others": """
        evaluation/models:reporting events:Reporter.advance events:Reporter.follow runs/distillation/corpus:start_stage""",
}
"""Tests, and the places whose question whether to stop between batches or shards they test."""
SHORT = {
    "static models: tens of thousands of sentences a second": """
        evaluation/candidates:_with_total models/static:StaticEncoder.encode""",
    "small files": """
        evaluation/contamination:Contamination.write report/card:write_cards tuning/records:write_tables
        runs/distillation/final_evaluation:_complete_table runs/distillation/precompute:_score_candidates""",
    "asks by `stop_of_score`: test_a_stop_in_a_dev_score_…": "runs/distillation/distillation_task:DevMetric.of",
    "a training step": """
        runs/mutual/pair_task:PairBatch.encode runs/mutual/pair_task:PairBatch._encode_part
        runs/mutual/pair_task:encode_streams teachers/teacher:PairTeacher.similarities
        teachers/teacher:LiveTeacher.similarities""",
    "a command that a signal ends at once": "models/onnx:export_encoder teachers/reuse:count_new_rows",
    "the Python API, without a run": "rank_space/encoder:RankSpaceEncoder.similarities",
    "one shard; the driver asks": """
        cluster/backend:RayBackend.embed cluster/embedding_actors:EmbeddingActor.embed teachers/embedding:embed_texts""",
}
"""Why loops over batches ask nobody, and the places that call them."""
_QUESTIONS, _HELPERS = {"advance", "check_stop", "follow"}, {"start_stage", "reporting"}
_LOOPS = """encode encode_each score_each embed_texts complete_shards embed_shards write_table write_part write_block
    write_shards knn from_sentences of_tokens missing_shards not_intact"""


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Yield all nodes of the package, each with its place: `module:function`, or `module:Class.method`."""
    for file in sorted((ROOT / "distcse").rglob("*.py")):
        module = file.relative_to(ROOT / "distcse").with_suffix("").as_posix()
        yield from nodes_below(ast.parse(file.read_text()), f"{module}:")


def nodes_below(tree: ast.AST, place: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(tree):
        inner = place
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not isinstance(tree, ast.FunctionDef):
            inner += child.name
        yield inner, child
        yield from nodes_below(child, f"{inner}." if isinstance(child, ast.ClassDef) else inner)


def places_of(table: dict[str, str]) -> set[str]:
    return set(" ".join(table.values()).split())


def test_each_place_that_asks_is_listed_with_its_test() -> None:
    found = set()
    for place, node in nodes():
        asks = isinstance(node, ast.Attribute) and node.attr in _QUESTIONS
        if asks or (isinstance(node, ast.Call) and ast.unparse(node.func) in _HELPERS):
            found.add(place)
    assert found == places_of(ASKS)


def test_no_loop_over_batches_is_called_without_a_question() -> None:
    found = set()
    for place, node in nodes():
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _LOOPS.split():
            passed = [*map(ast.unparse, node.args), *(str(keyword.arg) for keyword in node.keywords)]
            is_of_a_string = ast.unparse(node.func).endswith("encode") and (
                not node.args or isinstance(node.args[0], ast.Constant)
            )
            if not is_of_a_string and not re.search("progress|on_batch|on_rows|reporter", " ".join(passed)):
                found.add(place)
    assert found == places_of(SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("is_hung_up", [True, False])
def test_a_closed_pipe_or_terminal_leaves_a_checkpoint(
    is_hung_up: bool, recipe_with: Callable[..., Recipe], tmp_path: Path
) -> None:
    recipe_with("training.log_every=1", "training.max_steps=100000", "training.workers=0")
    command = [*TRAIN, str(tmp_path / "recipe.yaml"), "--json"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, env=user_environment(), cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "StepReport":
                break
        if is_hung_up:
            process.send_signal(signal.SIGHUP)
            assert json.loads(process.stdout.read().splitlines()[-1])["interrupted"]
        else:
            process.stdout.close()
        error = process.stderr.read()
    assert process.returncode == INTERRUPTED and "Traceback" not in error and "Exception" not in error, error
    assert list(tmp_path.glob("runs/*/checkpoints/step-*"))


def test_output_that_nobody_reads_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "distcse", "recipe", "reference"]
    done = subprocess.run(command, stdout=writer, stderr=PIPE, text=True, env=user_environment(), cwd=ROOT, check=False)
    os.close(writer)
    assert done.returncode == 141 and done.stderr == ""


def test_nohup_is_left_alone() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopOnSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.stop_requested() and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
