"""Runs a sweep on Ray.

It embeds the corpus once, searches with Ray Tune, trains the best values and the original recipe with several seeds, and
measures these models. Trials share the teachers' tables and servers.

Like `distcse.cluster.backend`, it imports Ray only in its functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from distcse.cluster.backend import RayBackend, RayCluster
from distcse.devices.gpu_plan import report_plans
from distcse.errors import RunRecordError, StoppedEarlyError
from distcse.events import LogMessage, Reporter, combine_listeners
from distcse.preflight.warnings import report_warnings
from distcse.recipe import BaseRecipe, Sweep, TeachersSection, recipe_yaml, with_values
from distcse.runs.backend import Backend, EmbeddingRequest, LocalBackend
from distcse.runs.cluster_fit import gpu_policy, joined_for_devices, waited_for_nodes
from distcse.runs.directory import RunDirectory, check_storage
from distcse.runs.distillation.distillation_task import (
    TrainSpec,
    table_clients,
    teacher_clients,
    train_student,
    with_worker_tables,
)
from distcse.runs.experiment import SharedTables, Trials, experiment_of
from distcse.runs.final_evaluation import FinalScores
from distcse.storage import ArtifactStore, to_uri
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import worker_tables
from distcse.text import Corpus
from distcse.tracking import require_trial_loggers
from distcse.training.trainer import TrainResult
from distcse.tuning.final_evaluation import measure
from distcse.tuning.records import Trial, find_best_trial, read_trials, write_tables
from distcse.tuning.space import Space
from distcse.tuning.sweep import SweepResult, check, reopen
from distcse.tuning.trial import TrialContext, track_trials
from distcse.tuning.trial_resources import TrialResources, least_requests, trial_resources

_TRIALS, _FINAL_RUNS = "trials", "final_runs"


def run_sweep(recipe: BaseRecipe, sweep: Sweep, directory: Path, reporter: Reporter) -> SweepResult:
    """Run a sweep in its folder, or resume it. Test sets are only used after the search.

    Raises:
        DistcseError: The sweep cannot continue. Ended trials are not repeated on resuming.
    """
    space = check(recipe, sweep)
    cluster, folder = RayCluster(fast_allocator=True), RunDirectory(directory)
    with gpu_policy(recipe.gpu_mode, computes_here=False), folder.leased(reporter), joined_for_devices(cluster):
        reporter = Reporter(combine_listeners(reporter.emit), reporter.stop_requested)
        try:
            return _run(recipe, sweep, space, folder, cluster, reporter)
        except StoppedEarlyError as stopped:
            stopped.run = str(folder.store)
            raise


def _run(
    recipe: BaseRecipe, sweep: Sweep, space: Space, folder: RunDirectory, cluster: RayCluster, reporter: Reporter
) -> SweepResult:
    directory, store, backend = folder.path, folder.store, RayBackend()
    reporter.emit(LogMessage(f"sweep directory {store}"))
    experiment = experiment_of(recipe)
    report_warnings(experiment.settings_warnings(), reporter)  # once, not in every trial
    interrupted, result_grid = False, None
    with cluster.joined(), waited_for_nodes(cluster, recipe, least_requests(recipe), reporter):
        require_trial_loggers(sweep.loggers)  # fail before the teachers embed the corpus
        nodes = cluster.nodes()
        resources = trial_resources(recipe, sweep, nodes)
        report_plans(resources.gpu_plans, reporter.emit)
        decided = experiment.trials.with_precisions(cluster, reporter, resources.trial_gpus)
        if decided != recipe:
            folder.decide(decided)
        trials = experiment_of(decided).trials
        _require_alike(decided, trials, cluster, directory)
        tables = trials.prepare(backend, reporter, folder)
        with _served(trials.teachers, tables, resources, reporter, directory.name) as trial_backend:
            from distcse.cluster.tune import search, train_all

            recipe, _ = reopen(directory)  # with what was decided from the data, as a resumed sweep reads it
            trials = experiment_of(recipe).trials
            trained, states = trials.recipe(resources.cpus, resources.gpus), directory / "ray_tune"
            try:
                context = TrialContext(trained, store / _TRIALS, trial_backend)
                with track_trials(sweep, context, reporter) as tracked:
                    result_grid = search(context, space, sweep, states / "search", resources, tracked)
                best_trial = _write_best_recipe(recipe, store)
                if best_trial is not None and sweep.final_runs.seeds:
                    context = TrialContext(trained, store / _FINAL_RUNS, trial_backend, keep_models=True)
                    values = _with_seeds(best_trial, sweep)
                    with track_trials(sweep, context, reporter) as tracked:
                        train_all(context, values, sweep, states / "final_runs", resources, tracked)
            except StoppedEarlyError:
                interrupted = True
    found, best_trial = read_trials(store / _TRIALS), _write_best_recipe(recipe, store)
    write_tables(found, store)
    final_results, final_runs = read_trials(store / _FINAL_RUNS), store / _FINAL_RUNS
    final = FinalScores(None, stopped=interrupted)
    if best_trial is not None and not interrupted:
        final = measure(trials, final_results, final_runs, recipe.gpu_mode, backend, reporter)
        final.write(store, final_runs)
    return SweepResult(
        recipe,
        sweep,
        directory,
        store,
        found,
        best_trial,
        final_results,
        final.evaluation,
        final.stopped,
        result_grid,
    )


def _require_alike(recipe: BaseRecipe, trials: Trials, cluster: RayCluster, directory: Path) -> None:
    """Check that every node that can run a trial, or its teachers, sees the sweep's folders."""
    needs, (workers, *_) = trials.needs, trials.processes
    check_storage(recipe.storage, [key.removeprefix("storage.") for key in needs.written])
    # The process that starts a trial's workers reserves next to nothing, and runs on any node.
    labels = [workers.labels if workers.number == 1 else None]
    labels += [] if trials.teachers is None else [trials.teachers.node_labels]
    cluster.require_alike({"storage.runs": directory, **needs.written}, needs.read, labels)


@contextmanager
def _served(
    section: TeachersSection | None,
    shared: SharedTables | None,
    resources: TrialResources,
    reporter: Reporter,
    name: str,
) -> Iterator[Backend | None]:
    """Start the servers of the teachers whose tables the trials don't read themselves; they end with the block."""
    if shared is None or section is None:
        yield None
        return
    from distcse.cluster.teacher_servers import served

    in_own_process, read_by_trials = resources.in_own_process, worker_tables(section, shared.tables)
    numbers = [
        number
        for number, table in enumerate(shared.tables)
        if table is None or not (in_own_process or number in read_by_trials)
    ]
    with served(section, shared.corpus, shared.tables, resources.server_gpus, reporter, name, numbers) as servers:
        yield TrialBackend(servers, in_own_process)


def _write_best_recipe(recipe: BaseRecipe, store: ArtifactStore) -> Trial | None:
    best_trial = find_best_trial(read_trials(store / _TRIALS))
    if best_trial is not None:
        store.write_text("best.yaml", recipe_yaml(with_values(recipe, best_trial.values)))
    return best_trial


def _with_seeds(best_trial: Trial, sweep: Sweep) -> list[dict[str, Any]]:
    """Return the final runs' values: the best trial's and the original recipe's, with each seed."""
    final_values = [{**best_trial.values, "seed": seed} for seed in sweep.final_runs.seeds]
    return final_values + [{"seed": seed} for seed in sweep.final_runs.seeds if sweep.final_runs.compare]


class TrialBackend(LocalBackend):
    """Trains trials in their processes, with embedding tables and teacher servers that all trials share."""

    def __init__(self, servers: Any, in_own_process: bool) -> None:
        self._servers = servers
        self._in_own_process = in_own_process

    def metered(self, reporter: Reporter, run: str) -> AbstractContextManager[Reporter]:
        from distcse.cluster.metrics import metered

        return metered(reporter, run)

    def embed(self, request: EmbeddingRequest) -> None:
        """Raise an error: the sweep embeds the corpus before its trials.

        Raises:
            RunRecordError: Shards of the table were removed during the sweep.
        """
        shards, folder = ", ".join(map(str, request.missing)), to_uri(request.table.directory)
        raise RunRecordError(f"shards {shards} of {folder} were removed during the sweep; run --resume")

    def train(
        self, spec: TrainSpec, corpus: Corpus, tables: Sequence[EmbeddingTable | None], reporter: Reporter
    ) -> TrainResult:
        spec = with_worker_tables(spec, tables)
        if not self._in_own_process:
            # Ray Train, which trials in one process do not need
            from distcse.cluster.nodes import alive
            from distcse.cluster.train_workers import train_in_workers
            from distcse.runs.distillation.processes import plan_run

            return train_in_workers(spec, self._servers, plan_run(spec.recipe, alive()), reporter)
        from distcse.cluster.teacher_servers import RemoteTeacherClient, co_located_servers

        section, run = spec.recipe.teachers, spec.run.name
        servers = co_located_servers(self._servers, section, run, 0, reporter)
        live = {number: RemoteTeacherClient(servers[number]) for number, table in enumerate(tables) if table is None}
        return train_student(spec, teacher_clients(spec, {**table_clients(spec, tables), **live}), reporter)
