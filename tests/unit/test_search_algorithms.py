"""Search algorithms of Ray Tune, the status of its trials, how many fit on the nodes, and the resources of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayTaskError
from ray.tune import PlacementGroupFactory

from distcse.cluster import tune
from distcse.cluster.tune import TrialListener, placement, tpe, trial_scheduler
from distcse.devices.resources import Node, Resources
from distcse.errors import ClusterTooSmallError, DistcseError, ModelOutputError, StorageWriteError
from distcse.events import Event, LogMessage, Reporter, WaitWarning
from distcse.recipe import Recipe, Sweep, TeachersSection, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.cluster_fit import report_gpus
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.precompute import prepare_tables, require_embedding
from distcse.runs.distillation.processes import least_requests as run_requests
from distcse.runs.distillation.processes import plans_of_run
from distcse.storage import open_store
from distcse.teachers.resources import EMBEDDING, plan_embedding
from distcse.tuning.records import Trial, TrialMetric, read_trials
from distcse.tuning.space import Space
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_resources import TrialResources, least_requests, trial_resources
from tests.clusters import FixedCluster
from tests.failures import fails_with
from tests.sweeps import LR, TAU2, make_sweep

ONE = TrialResources(concurrent=1, cpus=1.0, gpus=0.5, workers=1)


def test_tpe_samples_near_good_trials(recipe_with: Callable[..., Recipe], tmp_path: Path) -> None:
    """The scores are best at tau2 = 0.05 and equal weights, so its samples get closer to both."""
    parameters = {TAU2: {"log_uniform": [0.005, 0.5]}, "teachers.encoders.*.alpha": {"simplex": True}}
    sweep = make_sweep(tmp_path, parameters, search={"trials": 60, "n_startup_trials": 10})
    space = Space(sweep, recipe_with())
    searcher = tpe(space, sweep)
    far = []
    for number in range(60):
        found = space.values(searcher.suggest(str(number)))
        weight = found["teachers.encoders.0.alpha"]
        far.append(abs(math.log(found[TAU2] / 0.05)) + abs(weight - 0.5))
        searcher.on_trial_complete(str(number), {"best": -far[-1]})
    assert np.mean(far[-20:]) < np.mean(far[:10]) / 2


def test_pbt_keeps_a_choice_among_its_values(recipe_with: Callable[..., Recipe], tmp_path: Path) -> None:
    """Ray Tune's own exploration, 200 times."""
    from ray.tune.schedulers.pbt import _explore

    parameters = {LR: {"values": [2e-5, 3e-5, 5e-5]}, TAU2: {"log_uniform": [0.01, 0.1]}}
    search, schedule = {"algorithm": "random"}, {"kind": "pbt"}
    space = Space(sweep := make_sweep(tmp_path, parameters, search=search, schedule=schedule), recipe_with())
    mutations = trial_scheduler(sweep, space)._hyperparam_mutations
    chosen = {LR: 3e-5, TAU2: 0.05}
    seen = set()
    for _ in range(200):
        chosen, _ = _explore(chosen, mutations, 0.25, (1.2, 0.8), space.clip)
        seen.add(chosen[LR])
        assert 0.01 <= chosen[TAU2] <= 0.1
    assert seen == {2e-5, 3e-5, 5e-5}


def listener_of(trials: Path, reporter: Reporter | None = None, **settings: Any) -> TrialListener:
    recipe = load_recipe("minilm-3layer", ["evaluation.data=data"])
    return TrialListener(TrialContext(recipe, open_store(trials), **settings), reporter or Reporter(), ONE)


@pytest.mark.parametrize(
    ("keep_models", "status", "expected"),
    [
        (True, "failed", "failed"),
        (True, "stopped", "stopped"),
        (False, "failed", "failed"),
        (False, "stopped", "finished"),
    ],
)
def test_a_final_run_that_fails_after_its_last_score_is_not_finished(
    keep_models: bool, status: Any, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    Trial("one", {}, metrics=[TrialMetric(10, 100.0, 80.0, 1.0)]).write(open_store(tmp_path / "one"))
    listener_of(tmp_path, keep_models=keep_models).note_end("one", status, "No space left on device")
    (record,) = read_trials(open_store(tmp_path))
    assert record.status == expected


@pytest.mark.parametrize(
    ("error", "status"), [(StorageWriteError("the disk is full"), "running"), (ModelOutputError("no output"), "failed")]
)
def test_a_trial_that_storage_ends_is_not_failed_for_good_and_ends_the_sweep(
    error: DistcseError, status: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "one").mkdir()
    Trial("one", {}).write(open_store(folder))
    text, pickled = tmp_path / "error.txt", tmp_path / "error.pkl"
    text.write_text(str(error))
    pickled.write_bytes(ray.cloudpickle.dumps(RayTaskError("trial", "traceback", error)))
    trial = SimpleNamespace(trial_id="one", status="ERROR", error_file=str(text), pickled_error_file=str(pickled))
    listener = listener_of(tmp_path)
    listener.on_trial_error(1, [trial], trial)
    (record,) = read_trials(open_store(tmp_path))
    assert record.status == status
    with fails_with(StorageWriteError, "disk") if status == "running" else nullcontext():
        listener.on_step_end(1, [trial])


def test_a_sweep_without_a_running_trial_says_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "WaitWarning", partial(WaitWarning, after_s=-1.0))
    events: list[Event] = []
    listener = listener_of(tmp_path, Reporter(events.append))
    running, waiting, ended = (SimpleNamespace(status=status) for status in ("RUNNING", "PENDING", "TERMINATED"))
    for trials, number in (([running, waiting], 0), ([ended], 0), ([waiting, ended], 1), ([waiting], 1)):
        listener.on_step_end(1, trials)
        assert len(events) == number
    (event,) = events
    assert isinstance(event, LogMessage) and "a node with 1 CPU and 0.5 GPUs free; see `ray status`" in event.text


# -- resources of trials -------------------------------------------------------------------------------------------------


MakeRecipe = Callable[..., Recipe]


def nodes_of(resources: Sequence[Resources]) -> list[Node]:
    return [Node("", each, {}) for each in resources]


def sweep(**search: Any) -> Sweep:
    return Sweep(name="s", parameters={"training.lr": {"values": [1e-3, 1e-4]}}, search=search)


LIVE, CORES, PARTS = "teachers.mode=live", "training.cpus_per_worker", "training.gpus_per_worker"
CPUS, GPUS = {"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}


@pytest.mark.parametrize(
    ("overrides", "concurrent", "nodes", "expected"),
    [
        ([], None, [{"CPU": 4.0}], TrialResources(4, 1.0, 0.0, 1)),
        ([], 2, [{"CPU": 4.0}], TrialResources(2, 2.0, 0.0, 1)),
        # Six CPUs would be enough for three trials of two, but no trial spans two nodes of three.
        ([], 3, [{"CPU": 3.0}] * 2, TrialResources(3, 1.0, 0.0, 1)),
        ([f"{CORES}=2"], None, [{"CPU": 3.0}] * 2, TrialResources(2, 2.0, 0.0, 1)),
        (["training.workers=2", f"{CORES}=1"], None, [{"CPU": 3.0}] * 2, TrialResources(2, 1.0, 0.0, 2)),
        ([f"{CORES}=0.1"], None, [{"CPU": 1.0}], TrialResources(10, 0.1, 0.0, 1)),
        ([], None, [CPUS, GPUS], TrialResources(2, 4.0, 1.0, 1)),
        ([f"{PARTS}=0.5"], None, [{"CPU": 8.0, "GPU": 1.0}], TrialResources(2, 4.0, 0.5, 1)),
        ([f"{PARTS}=0.25"], 4, [{"CPU": 8.0, "GPU": 1.0}], TrialResources(4, 2.0, 0.25, 1)),
        ([LIVE], None, [{"CPU": 3.0}, {"CPU": 1.0}], TrialResources(2, 1.0, 0.0, 1)),  # 2 servers
        # Both servers are on one GPU, a trial on the other.
        ([LIVE], None, [GPUS], TrialResources(1, 6.0, 1.0, 1, server_gpus=0.25)),
    ],
)
def test_the_default_number_of_trials_is_what_fits(
    recipe_with: MakeRecipe,
    overrides: list[str],
    concurrent: int | None,
    nodes: list[Resources],
    expected: TrialResources,
) -> None:
    recipe = recipe_with("training.workers=1", *overrides)
    assert trial_resources(recipe, sweep(concurrent=concurrent), nodes_of(nodes)) == expected


def test_trials_run_on_labelled_nodes_only(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.workers=1", "training.node_labels={role: students}")
    nodes = [Node("a", {"CPU": 2.0}, {"role": "students"}), Node("b", {"CPU": 8.0}, {})]
    resources = trial_resources(recipe, sweep(), nodes)
    assert resources.concurrent == 2
    reserved = placement(resources)
    assert reserved.bundles == [{"CPU": 1.0}]
    assert reserved == PlacementGroupFactory([{"CPU": 1.0}], bundle_label_selector=[{"role": "students"}])
    with fails_with(ClusterTooSmallError, "role=students of training.node_labels"):
        trial_resources(recipe, sweep(), nodes[1:])


def test_trials_wait_for_nodes_that_an_autoscaler_starts(recipe_with: MakeRecipe) -> None:
    one_each = ("training.workers=1", "training.cpus_per_worker=2")
    nodes = nodes_of([{"CPU": 2.0}])
    with fails_with(ClusterTooSmallError, "4 concurrent trials"):
        trial_resources(recipe_with(*one_each), sweep(concurrent=4), nodes)
    growing = recipe_with(*one_each, "resources.wait_s=60")
    resources = trial_resources(growing, sweep(concurrent=4), nodes)
    assert resources.concurrent == 4 and resources.can_wait
    with fails_with(ClusterTooSmallError, "4 concurrent trials"):
        trial_resources(growing, sweep(concurrent=4), nodes_of([{"CPU": 1.0}]))
    on_gpus = recipe_with("training.workers=1", "training.gpus_per_worker=1", "resources.wait_s=60")
    nodes = nodes_of([{"CPU": 8.0, "GPU": 1.0}])
    resources = trial_resources(on_gpus, sweep(concurrent=4), nodes)
    assert resources == TrialResources(4, 8.0, 1.0, 1, can_wait=True)
    *_, plan = resources.gpu_plans
    assert plan.describe() == "trials 1 x 1"
    (trial,) = least_requests(growing)
    assert (trial.number, trial.each) == (1, {"CPU": 2.0})


def test_a_run_waits_for_what_its_recipe_sets(recipe_with: MakeRecipe) -> None:
    """Nodes that are not there have no CPUs and GPUs to share out."""
    labels = ("training.node_labels={role: students}", "teachers.node_labels={role: teachers}")
    recipe = recipe_with("training.workers=4", "resources.gpu=required", *labels)
    workers, embedding = run_requests(recipe)
    assert (workers.number, workers.each, workers.labels) == (4, {"CPU": 1.0, "GPU": 1.0}, {"role": "students"})
    assert (embedding.number, embedding.each, embedding.labels) == (1, {"CPU": 1.0, "GPU": 1.0}, {"role": "teachers"})
    requests = run_requests(recipe_with("training.workers=2", "training.cpus_per_worker=8", "teachers.mode=live"))
    assert requests[0].each == {"CPU": 8.0}
    assert {request.description for request in requests[1:]} == {"2 live teacher servers"}


def test_a_trial_across_nodes_is_refused(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.workers=1", "training.cpus_per_worker=2")
    with fails_with(ClusterTooSmallError, "3 training workers of 2 CPUs each", "2 x 3 CPUs", "search.concurrent"):
        trial_resources(recipe, sweep(concurrent=3), nodes_of([{"CPU": 3.0}] * 2))


@pytest.mark.parametrize(
    ("section", "nodes", "expected"),
    [
        ({}, [{"CPU": 8.0}], 0.0),
        ({}, [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 4.0}], 1.0),
        ({"embedding_workers": 8}, [{"CPU": 8.0, "GPU": 4.0}], 1.0),  # as many start as fit
        ({"embedding_workers": 8, "gpus_per_actor": 1}, [{"CPU": 8.0, "GPU": 4.0}], 1.0),
        ({"gpus_per_actor": 0}, [{"CPU": 8.0, "GPU": 4.0}], 0.0),
        ({"gpus_per_actor": 0.5}, [{"CPU": 8.0, "GPU": 4.0}], 0.5),
    ],
)
def test_embedding_actors_use_the_nodes_gpus(
    section: dict[str, Any], nodes: list[Resources], expected: float, tiny: Callable[..., Path]
) -> None:
    teachers = TeachersSection.model_validate({"encoders": [{"backbone": str(tiny())}], **section})
    assert plan_embedding(teachers, nodes_of(nodes), "auto").of(EMBEDDING) == expected


def test_a_required_gpu_is_asked_for_where_rows_are_missing(recipe_with: MakeRecipe) -> None:
    """The teachers' nodes have no GPU, which matters only while a table is incomplete."""
    labels = ("training.node_labels={role: students}", "teachers.node_labels={role: teachers}")
    recipe = recipe_with("resources.gpu=required", "training.workers=1", *labels)
    nodes = [
        Node(role, {"CPU": 4.0, "GPU": gpus}, {"role": role}) for role, gpus in (("students", 1.0), ("teachers", 0.0))
    ]
    cluster, messages = FixedCluster(nodes), list[Event]()
    report_gpus(cluster, recipe.gpu_mode, partial(plans_of_run, recipe), Reporter(messages.append))
    corpus = read_corpus(recipe, Reporter())
    with fails_with(ClusterTooSmallError, "the nodes with role=teachers have no GPU for the embedding actors"):
        require_embedding(recipe, corpus, cluster, Reporter())
    prepare_tables(recipe, corpus, LocalBackend(), Reporter())
    require_embedding(recipe, corpus, cluster, Reporter())
