"""A group ends with its start if no cycle has a higher dev score and the recipe asks for it: `mutual.best_of`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.errors import InvalidValueError
from distcse.evaluation import Contamination, RecordedScores, VectorModel, read_dev
from distcse.events import Event, GroupActivity, GroupEvent, Reporter
from distcse.models import Encoder
from distcse.recipe import MutualRecipe
from distcse.report.card import write_cards
from distcse.report.history import read_cycles, read_run
from distcse.report.page import html, markdown
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.runs.mutual.experiment import CycleScores
from distcse.runs.mutual.label_exchange import LabelExchange
from distcse.runs.mutual.phase_store import Phase, PhaseResult, PhaseStore, best_phase, dev_scores
from distcse.runs.result import MutualResult
from distcse.storage import dump_checked_json, load_checked_json, open_store
from tests.backends import run_mutual
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., MutualRecipe]
WITH_START = "mutual.best_of=start_and_cycles"
KEPT = "The best bi-encoder of group good is its start, unchanged"


@pytest.fixture
def make(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    """Return a function that makes a recipe of two groups, of which no cycle of `good` can reach the start on dev.

    The dev scores are its start's cosines, of which the start of `weak` knows nothing.
    """

    def make(*overrides: str) -> MutualRecipe:
        models = {"good": tiny("bert"), "weak": tiny("minilm")}
        recipe = make_mutual_recipe(tmp_path, models, sentences, "mutual.cycles=1", "bi.epochs=1", *overrides)
        dev, recorded = read_dev(recipe), RecordedScores()
        assert dev is not None
        dev.score(recorded.recording(VectorModel.of(Encoder.from_section(recipe.groups[0]))))
        rows = [f"{score:.6f}\t{one}\t{other}" for (one, other), score in recorded.known.items()]
        Path(recipe.evaluation.dev).write_text("\n".join(["score\tsentence1\tsentence2", *rows]))
        return recipe

    return make


def test_a_start_that_no_cycle_reaches_is_the_best_and_reports_say_so(make: MakeRecipe, labelled: Path) -> None:
    """Also after a stop: the resumed run knows its starts' scores, or scores them again."""
    overrides = (f"evaluation.data={labelled}", "evaluation.final_suites=[sts]")
    pairs = f"pairs={{path: '{labelled}/sts/stsb/test.tsv.gz'}}"
    result = resumed_after_a_stop(make(WITH_START, pairs, *overrides))
    best = {f"{each.group} {each.kind}": each for each in result.best}
    trained = PhaseStore(open_store(result.directory.path)).posted(Phase(2))
    assert [name for name, each in best.items() if each.is_start] == ["good bi"]
    assert best["good bi"].dev == pytest.approx(100, abs=0.1)
    assert best["weak bi"].phase == Phase(2) and best["good cross"].phase == Phase(1)
    assert trained["good"]["dev"] < 99 and trained["weak"]["dev"] == best["weak bi"].dev

    start = Encoder.from_section(result.recipe.groups[0])
    saved = Encoder.load(best["good bi"].model)
    assert (saved.pooling, saved.max_length) == (start.pooling, start.max_length)
    for name, weights in start.state_dict().items():
        assert torch.equal(saved.state_dict()[name], weights), name

    assert result.evaluation is not None
    (row,) = (row for row in result.evaluation.scores if (row.set, row.measure) == ("STS-B", "all"))
    assert row.values["good bi"] == pytest.approx(row.values["good start"])
    assert "(its start: no cycle is better" in result.summary[0]
    history = read_run(result.directory.path)
    text = markdown(result.evaluation, history)
    for page in (html(result.evaluation, history), text):
        assert KEPT in page and "group weak is its start" not in page
    assert "| model | start | cycle 1 |" in text
    rows = {name: next(row for row in text.splitlines() if row.startswith(f"| {name} |")) for name in best}
    assert "‡" in rows["weak bi"] and "‡" not in rows["good bi"], "the start has not seen the pairs"
    write_cards(result)
    cards = {name: (each.model / "README.md").read_text() for name, each in best.items()}
    assert "unchanged. No cycle of the run" in cards["good bi"] and "dataset_size:0" in cards["good bi"]
    overlaps = {name: Contamination.read(best[name].model).overlap for name in ("good bi", "weak bi")}
    assert overlaps["weak bi"] and not overlaps["good bi"]


def resumed_after_a_stop(recipe: MutualRecipe) -> MutualResult:
    """Run until the groups are at work, lose the score of one start as if the driver had been killed then, and resume."""
    groups_at_work: list[Event] = []

    def note(event: Event) -> None:
        if isinstance(event, GroupEvent):
            groups_at_work.append(event)

    stopped = run_mutual(recipe, Reporter(note, lambda: bool(groups_at_work)))
    assert stopped.interrupted
    file = stopped.directory.path / "phases.json"
    state = load_checked_json(file)
    assert set(state["starts"]) == {"good", "weak"}
    del state["starts"]["good"]
    file.write_text(dump_checked_json(state))
    directory, reopened = RunDirectory.reopen(stopped.directory.path, [])
    assert isinstance(reopened, MutualRecipe)
    return run_mutual(reopened, Reporter(), directory)


def post_two_cycles(recipe: MutualRecipe, folder: Path) -> PhaseStore:
    """Store a run in which the bi-encoders of both groups get better in each cycle, and stay below their starts."""
    store = PhaseStore(open_store(folder, Lease.acquire(open_store(folder))))
    store.record_starts({"good": 90.0, "weak": 70.0})
    exchange = LabelExchange(recipe, store, threading.Event())
    for phase in map(Phase, range(5)):
        dev = 60.0 if phase.kind == "cross" else 50.0 + phase.number
        for group in ("good", "weak"):
            trained = PhaseResult(1, dev, 1) if phase.number else None
            exchange.post(group, phase, np.zeros(3, dtype=np.float32), trained)
    return store


@pytest.mark.parametrize(
    ("overrides", "scores", "best", "best_starts"),
    [((), [52.0, 54.0], Phase(4), []), ((WITH_START,), [80.0, 80.0], Phase(0), ["good", "weak"])],
)
def test_trials_and_reports_have_the_scores_of_the_models_that_the_run_ends_with(
    make: MakeRecipe,
    tmp_path: Path,
    overrides: tuple[str, ...],
    scores: list[float],
    best: Phase,
    best_starts: list[str],
) -> None:
    """By default the best cycle is taken, and the start is only reported; else cycles below it do not count as better."""
    recipe = make("mutual.cycles=3", "mutual.patience=1", *overrides)
    store = post_two_cycles(recipe, tmp_path)
    assert (store.stopped_after == Phase(4)) is bool(overrides)
    found = CycleScores(recipe, open_store(tmp_path)).of(GroupEvent("good", GroupActivity("", "finished")))
    assert [score.score for score in found] == scores
    assert best_phase(dev_scores(recipe, store, "good", "bi")) == best
    cycles = read_cycles(tmp_path, ["good", "weak"], [], recipe.mutual.best_of)
    assert cycles.best_starts == best_starts and cycles.dev["good bi"][0] == 90.0


def test_a_selection_by_dev_scores_needs_them(make: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "mutual.best_of", "evaluation.dev"):
        make(WITH_START, "evaluation.dev=none")
