"""Labels: whose scores they combine, with which weights, and in which band, whatever happens to the run."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from distcse.checks import require
from distcse.errors import InvalidValueError, RunRecordError, RunTakenOverError, StoppedEarlyError
from distcse.events import GroupActivity, GroupEvent
from distcse.recipe import MutualRecipe
from distcse.report.history import read_cycles
from distcse.runs.lease import Lease
from distcse.runs.mutual import label_exchange
from distcse.runs.mutual.experiment import CycleScores
from distcse.runs.mutual.label_exchange import LabelExchange, combine, to_band
from distcse.runs.mutual.phase_store import Phase, PhaseResult, PhaseStore, StoredScores, best_phase, dev_scores
from distcse.runs.mutual.preflight import recipe_questions
from distcse.storage import open_store, sha256
from tests.disks import killed_before
from tests.failures import fails_with
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., MutualRecipe]
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 2.0}
LAST = 6
"""The last phase of three cycles."""
STARTS = {"a": 80.0, "b": 60.0, "c": -10.0}
SETTINGS = [
    [],
    ["standardize=true"],
    ["standardize=true", "learn_from=both"],
    ["standardize=true", "learn_from=both", "weigh_by=group_and_dev"],
]

BY_DEV = ("mutual.standardize=true", "mutual.weigh_by=group_and_dev")


@pytest.fixture
def three(tmp_path: Path, sentences: list[str]) -> MakeRecipe:
    """Recipes of the groups a, b and c, whose models nobody loads."""
    weights = [f"groups.{number}.weight={weight}" for number, weight in enumerate(WEIGHTS.values())]
    models = {name: Path("none") for name in WEIGHTS}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, *weights, *overrides)


@cache
def scores_of(group: str, phase: int) -> np.ndarray:
    """Scores of six pairs, in a band of the group's."""
    draw, place = np.random.default_rng([ord(group), phase]), "abc".index(group)
    return draw.normal(0.3 * place, 0.05 + 0.1 * place, 6).astype(np.float32)


def mean_of(scores: list[np.ndarray], weights: list[float], standardize: bool) -> np.ndarray:
    """The definition of the labels, in as few lines as possible."""
    table = np.array(scores, dtype=np.float64)
    if standardize:
        means, deviations = table.mean(1, keepdims=True), table.std(1, keepdims=True)
        table = (table - means) / deviations * np.average(deviations, axis=0, weights=weights)
        table += np.average(means, axis=0, weights=weights)
    return np.average(table, axis=0, weights=weights)


class DisturbedRun(RuleBasedStateMachine):
    """Three groups post their scores while the driver is killed, resumed or replaced, and groups are dropped.

    The labels must be those of a run in which only the posts and the drops have happened, in the same order.
    """

    recipe: MutualRecipe

    @initialize(label_band=st.sampled_from(["shared", "own"]))
    def begin(self, label_band: str) -> None:
        a, b, c = self.recipe.groups
        b = b.model_copy(update={"label_band": label_band})
        self.disturbed, self.mutual = self.recipe.model_copy(update={"groups": [a, b, c]}), self.recipe.mutual
        self.folder = Path(tempfile.mkdtemp())
        self.posted: dict[int, dict[str, float]] = {number: {} for number in range(LAST + 1)}
        """Dev scores of the groups by phase."""
        self.members, self.labels = list(WEIGHTS), dict[int, np.ndarray]()
        self.resume()
        self.store.record_starts(STARTS)

    @rule()
    def resume(self) -> None:
        self.store = PhaseStore(open_store(self.folder, Lease.acquire(open_store(self.folder))))
        self.ending = threading.Event()
        self.exchange = LabelExchange(self.disturbed, self.store, self.ending)

    @rule(group=st.sampled_from([*WEIGHTS]), dev=st.sampled_from([-10.0, 50.0, 90.0]), killed_at=st.integers(0, 24))
    def post(self, group: str, dev: float, killed_at: int) -> None:
        number = next((number for number in self.posted if group not in self.posted[number]), None)
        if group not in self.members or number is None or number - 1 not in {-1, *self.labels}:
            return
        trained = PhaseResult(1, dev, 1) if number else None
        self.do(killed_at, lambda: self.exchange.post(group, Phase(number), scores_of(group, number), trained))
        if group not in self.store.posted(Phase(number)):  # killed before: the resumed group scores again
            self.exchange.post(group, Phase(number), scores_of(group, number), trained)
        self.posted[number][group] = dev if number else STARTS[group]
        self.complete()

    @rule(devs=st.lists(st.sampled_from([-10.0, 50.0, 90.0]), min_size=3, max_size=3))
    def post_all(self, devs: list[float]) -> None:
        for group, dev in zip(WEIGHTS, devs, strict=True):
            self.post(group, dev, 0)

    @rule(group=st.sampled_from([*WEIGHTS]), killed_at=st.integers(0, 12))
    def drop(self, group: str, killed_at: int) -> None:
        if group not in self.members:
            return
        if self.members == [group]:
            assert not self.exchange.drop(group, "lost")
            return
        self.do(killed_at, lambda: self.exchange.drop(group, "lost"))
        assert group in self.store.dropped or self.exchange.drop(group, "lost")
        self.members.remove(group)
        self.complete()

    @rule()
    def take_over(self) -> None:
        """An older start writes nothing."""
        older, older_store = self.exchange, self.store
        self.resume()
        with fails_with(RunTakenOverError, str(self.folder)):
            older_store.drop("a", "too late")
        with fails_with(RunTakenOverError, str(self.folder)):
            older.post("a", Phase(LAST), scores_of("b", 0), None)

    @rule()
    def end(self) -> None:
        """An ending run waits for no labels, and drops no group: closing a group makes it fail."""
        self.exchange.end()
        with pytest.raises(StoppedEarlyError):
            self.exchange.labels("a", Phase(1))
        assert self.ending.is_set() and not self.exchange.drop("a", "its actors were closed")
        self.resume()

    @invariant()
    def labels_are_those_of_an_undisturbed_run(self) -> None:
        for number in range(LAST + 1):
            expected, found = self.labels.get(number), self.store.labels(Phase(number))
            assert (found is None) == (expected is None)
            following = Phase(number + 1)
            assert self.exchange.has_labels(following) == (expected is not None) and self.exchange.has_labels(Phase(0))
            missing = [name for name in self.members if name not in self.posted[number]]
            assert self.exchange.missing(Phase(number)) == missing
            if expected is None or found is None:
                continue
            np.testing.assert_allclose(found, expected, atol=1e-6)
            for group in self.members:
                labels, start = self.exchange.labels(group, following).read(), scores_of(group, 0)
                is_moved = group == "b" and following.kind == "bi" and self.disturbed.groups[1].label_band == "own"
                if is_moved:
                    assert (labels.mean(), labels.std()) == pytest.approx((start.mean(), start.std()), abs=1e-5)
                    assert np.corrcoef(labels, found)[0, 1] == pytest.approx(1, abs=1e-5)
                else:
                    np.testing.assert_array_equal(labels, found)

    def do(self, killed_at: int, work: Callable[[], object]) -> None:
        """Do some work; with a number, the driver is killed before that write of the work, and resumes."""
        with killed_before(self.folder, killed_at):
            work()
        if killed_at:
            self.resume()

    def complete(self) -> None:
        """Combine the labels of each phase for which all members have posted: the undisturbed run."""
        for number, posted in self.posted.items():
            if number in self.labels or any(name not in posted for name in self.members):
                continue
            phases = [number, number - 1] if self.mutual.learn_from == "both" and number else [number]
            taken = [(each, name) for each in phases for name in self.members]
            weights = [WEIGHTS[name] * self.by_dev(self.posted[each][name]) for each, name in taken]
            scores = [scores_of(name, each) for each, name in taken]
            self.labels[number] = mean_of(scores, weights, self.mutual.standardize)

    def by_dev(self, dev: float) -> float:
        if self.mutual.weigh_by == "group":
            return 1.0
        rho = min(max(dev / 100, 0.01), 0.99)
        return rho / (1 - rho**2)

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.parametrize("overrides", SETTINGS, ids=lambda overrides: " ".join(overrides) or "the paper's")
def test_a_disturbed_run_makes_the_labels_of_an_undisturbed_one(
    three: MakeRecipe, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power failure here
    recipe = three("mutual.cycles=3", *(f"mutual.{override}" for override in overrides))
    monkeypatch.setattr(DisturbedRun, "recipe", recipe, raising=False)
    run_state_machine_as_test(
        DisturbedRun, settings=settings(max_examples=4, stateful_step_count=25, deadline=None, derandomize=True)
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["mutual.learn_from=both"], "learn_from is both, "),
        (["mutual.weigh_by=group_and_dev"], "mutual.standardize: true"),
        ([*BY_DEV, "evaluation.dev=none"], "name a dev set"),
        ([*BY_DEV, "evaluation.dev=labelled.tsv"], "give dev pairs with a column score"),
    ],
)
def test_labels_whose_scores_have_no_common_scale_are_refused(
    three: MakeRecipe, overrides: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("labelled.tsv").write_text("label\tsentence1\tsentence2\n1\ta\tb\n0\tc\td\n")
    with fails_with(InvalidValueError, named):
        require(recipe_questions(three(*overrides)))


@pytest.mark.parametrize("standardize", [False, True])
def test_labels_are_combined_in_parts_to_the_same_bits(standardize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standardized scores of a narrow band count as much as others; equal ones stay equal."""
    draw = np.random.default_rng(0)
    scores = [draw.normal(0.1 * n, 0.01 + 0.1 * n, 1001).astype(np.float32) for n in range(9)]
    weights = draw.uniform(0.5, 2, 9).tolist()
    whole = combine(scores, weights, standardize)
    np.testing.assert_allclose(whole, mean_of(scores, weights, standardize), atol=1e-6)
    monkeypatch.setattr(label_exchange, "PAIRS_PER_PART", 10)
    np.testing.assert_array_equal(combine(scores, weights, standardize), whole)
    constant = np.full(30, 0.5, np.float32)
    assert combine([constant], [1], standardize) == pytest.approx(constant)


@pytest.mark.parametrize(
    ("labels", "cosines", "moved"),
    [
        ([0.3] * 4, [0.6, 0.8, 0.6, 0.8], [0.7] * 4),  # equal labels are moved only
        ([0.0] * 19 + [1.0], [0.8, 1.0] * 10, [0.877] * 19 + [1.0]),  # labels stay cosines
    ],
)
def test_labels_in_a_band_that_they_cannot_fill(labels: list[float], cosines: list[float], moved: list[float]) -> None:
    found = to_band(np.array(labels, dtype=np.float32), np.array(cosines, dtype=np.float32))
    assert found.tolist() == pytest.approx(moved, abs=1e-3)


def test_labels_are_one_mapped_file_for_all_groups(tmp_path: Path) -> None:
    store = PhaseStore(open_store(tmp_path))
    assert store.stored_labels(Phase(0)) is None
    written = np.linspace(0, 1, 9, dtype=np.float32)
    store.store_labels(Phase(0), written)
    stored = store.stored_labels(Phase(0))
    digest = sha256([written.tobytes()])
    assert stored == StoredScores(open_store(tmp_path) / "labels", f"start.{digest[:12]}.npy", digest)
    mapped = stored.read()
    np.testing.assert_array_equal(mapped, written)
    assert not mapped.flags.writeable and not mapped.flags.owndata
    (tmp_path / "labels" / stored.name).unlink()
    with fails_with(RunRecordError, stored.name):
        stored.read()


def test_trials_and_reports_have_the_scores_of_the_best_cycle(three: MakeRecipe, tmp_path: Path) -> None:
    """The starts are reported next to it, also where they are better."""
    recipe = three("mutual.cycles=3")
    store = PhaseStore(open_store(tmp_path, Lease.acquire(open_store(tmp_path))))
    store.record_starts({"a": 90.0, "b": 70.0, "c": 60.0})
    exchange = LabelExchange(recipe, store, threading.Event())
    scored = CycleScores(recipe, open_store(tmp_path))
    found: list[float] = []
    for phase in map(Phase, range(LAST + 1)):
        dev = {0: None, 2: 52.0, 4: 54.0, 6: 50.0}.get(phase.number, 60.0)
        for group in WEIGHTS:
            trained = PhaseResult(1, dev, 1) if phase.number else None
            exchange.post(group, phase, scores_of(group, phase.number), trained)
        found += [each.score for each in scored.of(GroupEvent("a", GroupActivity(phase.name, "waiting")))]
    assert found == [52.0, 54.0, 54.0]
    assert best_phase(dev_scores(store, "a", "bi", Phase(LAST))) == Phase(4)
    assert best_phase(dev_scores(store, "a", "cross", Phase(LAST))) == Phase(1)  # the earliest of equal ones
    cycles = read_cycles(tmp_path, [*WEIGHTS], [])
    assert cycles.dev["a bi"] == {0: 90.0, 1: 52.0, 2: 54.0, 3: 50.0}
    assert [*cycles.columns.values()] == ["start", "cycle 1", "cycle 2", "cycle 3"]
