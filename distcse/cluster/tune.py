"""Runs trials with Ray Tune: function trainables, searchers, schedulers and restoring. No other module imports Tune.

A trial with at most one worker trains in its own process. A trial with several workers starts a `TorchTrainer` in it, which
is Ray's pattern since Train V2. Only dev scores go to Ray Tune, by `ray.tune.report`; the rest is on the sweep's storage.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayActorError
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator

from distcse.cluster.assigned_resources import use_assigned
from distcse.cluster.nodes import own_node_drains
from distcse.cluster.versions import TUNE, TUNE_TRIAL, pending_trials, set_callbacks
from distcse.devices import host
from distcse.devices.resources import format_resources
from distcse.errors import StoppedEarlyError, StorageError
from distcse.events import Reporter, TrialUpdate, WaitWarning
from distcse.recipe import Sweep
from distcse.storage import open_store, to_uri
from distcse.tuning.records import Status, Trial, read_trial, read_trials, register_trial
from distcse.tuning.space import WEIGHT_BOUNDS, Space
from distcse.tuning.trial import TrialContext, clear, run_trial
from distcse.tuning.trial_resources import TrialResources

_METRIC, _NOW, _PROGRESS = "best", "dev", "progress"
_END = 101
"""ASHA's max_t; above the last report's 100, so that ASHA never stops a complete trial."""


def search(
    context: TrialContext, space: Space, sweep: Sweep, folder: Path, resources: TrialResources, reporter: Reporter
) -> tune.ResultGrid:
    """Run a search, or continue the one whose state is in `folder`. The results are in the trials' records.

    Raises:
        StoppedEarlyError: `reporter` requested a stop. Running trials stay unfinished, and a resumed sweep continues them.
    """
    parameters: dict[str, Any] = {}
    samples, searcher = sweep.search.trials, None
    if sweep.schedule.kind == "pbt":
        context = replace(context, exchanges_checkpoints=True)
        parameters, searcher = _domains(space), BasicVariantGenerator(random_state=sweep.search.seed)
    elif sweep.search.algorithm == "tpe":
        searcher = tpe(space, sweep)
    else:
        drawn = sweep.search.algorithm == "random"
        points = space.draw(samples, sweep.search.seed) if drawn else space.grid()
        parameters, samples = {"sample": tune.grid_search(points)}, 1
    config = _config(sweep, resources, samples, searcher, space)
    return _fit(context, space.values, parameters, config, sweep, folder, resources, reporter)


def train_all(
    context: TrialContext,
    points: Sequence[dict[str, Any]],
    sweep: Sweep,
    folder: Path,
    resources: TrialResources,
    reporter: Reporter,
) -> None:
    """Train the recipe with each set of values, without a scheduler and without a limit of hours."""
    schedule = sweep.schedule.model_copy(update={"kind": "none"})
    unlimited = sweep.search.model_copy(update={"hours": None})
    final_sweep = sweep.model_copy(update={"schedule": schedule, "search": unlimited})
    config = _config(final_sweep, resources, 1, None, None)
    _fit(context, dict, {"sample": tune.grid_search([*points])}, config, final_sweep, folder, resources, reporter)


def _fit(
    context: TrialContext,
    values: Callable[[dict[str, Any]], dict[str, Any]],
    space: dict[str, Any],
    config: tune.TuneConfig,
    sweep: Sweep,
    folder: Path,
    resources: TrialResources,
    reporter: Reporter,
) -> tune.ResultGrid:
    os.environ.update(TUNE | pending_trials(resources.concurrent if resources.can_wait else 1))
    logging.getLogger("ray.tune").setLevel(logging.ERROR)

    def trial(sample: dict[str, Any]) -> None:
        use_assigned()
        os.environ.update(TUNE_TRIAL)
        name, chosen = tune.get_context().get_trial_id(), values(sample.get("sample", sample))
        checkpoint = tune.get_checkpoint() if context.exchanges_checkpoints else None
        try:
            with checkpoint.as_directory() if checkpoint else nullcontext() as donor:
                run_trial(context, name, chosen, _report, Path(donor) if donor else None, own_node_drains())
        except StoppedEarlyError as stopped:
            # This is the error with which Ray Tune starts a trial elsewhere without counting a failure. Waiting for the loss of
            # the node instead would keep a node without a deadline, which ends once nothing runs there.
            raise RayActorError(error_msg=f"Ray drains the node of this trial: {stopped}", preempted=True) from stopped
        finally:
            host.release_memory()

    trainable = tune.with_resources(trial, placement(resources))
    listener = TrialListener(context, reporter, resources)
    if _can_restore(folder):
        # Those that storage ended continue; a trial with a record of its end only repeats its scores (see `run_trial`).
        tuner = tune.Tuner.restore(to_uri(folder), trainable, resume_errored=True, param_space=space)
        set_callbacks(tuner, [listener])
    else:
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=config,
            run_config=tune.RunConfig(
                name=folder.name,
                storage_path=to_uri(folder.parent),
                failure_config=tune.FailureConfig(max_failures=sweep.search.max_failures),
                callbacks=[listener],
                # Each is a trial's full state; PBT only needs recent ones.
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4 if context.exchanges_checkpoints else None),
                verbose=0,
            ),
        )
    results = tuner.fit()
    for record in read_trials(context.trials):
        if not record.ended:  # still running after `search.hours`, or missing from a damaged state of Ray Tune
            listener.note_end(record.name, "stopped")
    return results


def placement(resources: TrialResources) -> Any:
    """Return what a trial's process reserves, in the form in which Ray Tune takes it with the labels of its node."""
    if resources.node_labels is None or not resources.in_own_process:
        return resources.reserved
    return tune.PlacementGroupFactory([resources.reserved], bundle_label_selector=[dict(resources.node_labels)])


def _can_restore(folder: Path) -> bool:
    """Whether Ray Tune can restore the search in a folder; removes a state that a killed driver left incomplete.

    Ray Tune would restore an incomplete state, train one trial and end. A new search instead copies the scores of finished
    trials with the same values.
    """
    if not tune.Tuner.can_restore(to_uri(folder)):
        return False
    store = open_store(folder)
    if store.is_remote:  # objects are written atomically
        return any(name.startswith("experiment_state-") for name in store.list_names())
    states = sorted(folder.glob("experiment_state-*.json"), key=lambda file: file.stat().st_mtime)
    try:
        json.loads(states[-1].read_text(encoding="utf-8"))
    except (IndexError, ValueError):
        shutil.rmtree(folder)
        return False
    return True


def _report(metrics: dict[str, Any]) -> None:
    folder = metrics.pop("checkpoint", None)
    tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder) if folder else None)


def _config(
    sweep: Sweep, resources: TrialResources, samples: int, searcher: Any, space: Space | None
) -> tune.TuneConfig:
    hours = sweep.search.hours
    return tune.TuneConfig(
        # PBT copies the current weights, so it compares current scores, not the best ones.
        metric=_NOW if sweep.schedule.kind == "pbt" else _METRIC,
        mode="max",
        search_alg=searcher,
        scheduler=trial_scheduler(sweep, space),
        num_samples=samples,
        max_concurrent_trials=resources.concurrent,
        time_budget_s=None if hours is None else hours * 3600,
        # A group's thread may train on after its trial is stopped, for longer than Ray Tune waits before it reuses the actor.
        reuse_actors=resources.can_reuse_process,
        trial_dirname_creator=lambda trial: trial.trial_id,
    )


def trial_scheduler(sweep: Sweep, space: Space | None) -> Any:
    """Return Ray Tune's scheduler of a sweep's trials, or None without one."""
    schedule = sweep.schedule
    share = max(1, 100 * schedule.grace_period)
    if schedule.kind == "asha":
        return ASHAScheduler(
            time_attr=_PROGRESS, grace_period=share, reduction_factor=schedule.reduction_factor, max_t=_END
        )
    if schedule.kind == "pbt" and space is not None:
        return PopulationBasedTraining(
            time_attr=_PROGRESS,
            perturbation_interval=share,
            # Choices as lists: Ray Tune would multiply numbers of a `tune.choice` by 0.8 or 1.2.
            hyperparam_mutations={**_domains(space), **space.choices},
            custom_explore_fn=space.clip,
        )
    return None


def _domains(space: Space) -> dict[str, Any]:
    """Return Ray Tune's domain of each free parameter, from which PBT draws and perturbs values."""
    choices, found = space.choices, dict[str, Any]()
    for path, parameter in space.free.items():
        if parameter.values is not None:
            found[path] = tune.choice(choices[path])
        elif parameter.integers:
            found[path] = tune.randint(parameter.integers[0], parameter.integers[1] + 1)
        elif parameter.log_uniform:
            found[path] = tune.loguniform(*parameter.log_uniform)
        else:
            found[path] = tune.uniform(*(parameter.uniform or WEIGHT_BOUNDS))
    return found


def tpe(space: Space, sweep: Sweep) -> Any:
    """Return Ray Tune's Optuna searcher: multivariate TPE, which counts running trials as bad ones (constant liar)."""
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            multivariate=True,
            constant_liar=True,
            n_startup_trials=sweep.search.n_startup_trials,
            seed=sweep.search.seed,
        )
    return OptunaSearch(space.distributions(), metric=_METRIC, mode="max", sampler=sampler)


class TrialListener(tune.Callback):  # type: ignore[misc]
    """Ray Tune callback in the sweep's process: records how trials end, reports updates and waits, passes stop requests on."""

    def __init__(self, context: TrialContext, reporter: Reporter, resources: TrialResources) -> None:
        self._context, self._reporter, self._resources = context, reporter, resources
        self._wait_warning = WaitWarning(reporter)
        self._storage_failure: StorageError | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing, since Ray Tune pickles its callbacks; a resumed sweep sets a new listener."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        register_trial(self._context.trials, trial.trial_id)
        self._emit_update(trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self._emit_update(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.note_end(trial.trial_id, "stopped")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        file = trial.pickled_error_file
        error = file and ray.cloudpickle.loads(Path(file).read_bytes())
        cause = getattr(error, "cause", error)
        if isinstance(
            cause, StorageError
        ):  # every trial would fail so: the sweep ends, and continues them when resumed
            self._storage_failure = cause
        else:
            self.note_end(trial.trial_id, "failed", _last_error(trial))

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        text = f"trial {trial.trial_id} starts again from its last checkpoint: {_last_error(trial)}"
        self._reporter.warn(text)

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self._storage_failure is not None:
            raise self._storage_failure
        self._reporter.check_stop("in the sweep")
        self._warn_of_wait([trial.status for trial in trials])

    def _warn_of_wait(self, statuses: Sequence[str]) -> None:
        """Warn if no trial runs for a while, such as after all their nodes were drained."""
        if "RUNNING" in statuses or "PENDING" not in statuses:
            self._wait_warning.restart()
        elif self._wait_warning.is_due:
            needed = format_resources(self._resources.reserved)
            self._wait_warning.check(
                f"no trial runs: the next one starts its process, or waits for a node with {needed} free; see `ray status`"
            )

    def note_end(self, name: str, status: Status, reason: str = "") -> None:
        """Record the status of a trial that ended without recording one itself: Ray Tune ended it."""
        folder = self._context.trials / name
        record = read_trial(folder)
        if record is not None and not record.ended:
            complete = bool(record.metrics) and record.metrics[-1].progress >= 100
            # All scores are not enough for a trial that failed, or for a final run, whose model must be saved.
            done = complete and status == "stopped" and not self._context.keep_models
            replace(record, status="finished" if done else status, reason=reason).write(folder)
            clear(folder)
        self._emit_update(name)

    def _emit_update(self, name: str) -> None:
        record = read_trial(self._context.trials / name)
        if record is not None:
            self._reporter.emit(trial_update(record))


def _last_error(trial: Any) -> str:
    """Return the last line of the last error of one of Ray Tune's trials."""
    reason = trial.error_file and Path(trial.error_file).read_text(encoding="utf-8").strip().splitlines()[-1]
    return reason or "its process was lost"


def trial_update(trial: Trial) -> TrialUpdate:
    """Return the event that reports a trial's state."""
    last, best = trial.metrics[-1] if trial.metrics else None, trial.best
    return TrialUpdate(
        trial.name,
        trial.status,
        last.progress if last else 0.0,
        last.score if last else None,
        best.score if best else None,
        trial.values,
        trial.reason,
    )
