"""The one module that knows Ray Tune's surface: trials as function trainables, searchers, schedulers, resuming, loggers.

A trial of up to one worker trains in its own process; one of several builds a `TorchTrainer` inside it, which is Ray's
pattern since Train V2. Dev scores go to Ray Tune by `ray.tune.report`; all else stays on the sweep's storage.
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

from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator

from distcse.errors import LoggerSetupError
from distcse.events import Reporter, TrialUpdate
from distcse.recipe import MutualRecipe, Sweep
from distcse.storage import RemotePath, names, to_uri
from distcse.teachers.servers import use_assigned_gpus, use_assigned_threads
from distcse.tracking import require_mlflow_server
from distcse.trainer import allocator
from distcse.tuning.records import Status, Trial, read_trial, read_trials, register_trial
from distcse.tuning.space import WEIGHT_BOUNDS, Space
from distcse.tuning.trial import TrialContext, clear, run_trial
from distcse.tuning.trial_resources import TrialResources

_METRIC, _NOW, _PROGRESS = "best", "dev", "progress"
_END = 101
"""Beyond the last report: a trial that comes to its end ends by itself."""
_SETTINGS = {
    # Ours are named below; of Ray Tune's own, two write what the records already hold.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # Ctrl-C belongs to whoever called us.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # What a killed driver may lose of Ray Tune's own state, in seconds.
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
}


class StoppedError(Exception):
    """The sweep was asked to stop. Trials under way are left as they are, to be gone on with."""


def search(
    context: TrialContext, space: Space, sweep: Sweep, folder: Path, room: TrialResources, reporter: Reporter
) -> None:
    """Carry out a search, or go on with the one whose state is in `folder`. What it finds is in the trials' records.

    Raises:
        StoppedError: `reporter` wished it.
    """
    if sweep.schedule.kind == "pbt":
        config = _config(
            context, sweep, room, sweep.search.trials, BasicVariantGenerator(random_state=sweep.search.seed), space
        )
        _fit(replace(context, exchanges=True), space.values, _domains(space), config, sweep, folder, room, reporter)
    elif sweep.search.algorithm == "tpe":
        config = _config(context, sweep, room, sweep.search.trials, tpe(space, sweep))
        _fit(context, space.values, {}, config, sweep, folder, room, reporter)
    else:
        drawn = sweep.search.algorithm == "random"
        points = space.draws(sweep.search.trials, sweep.search.seed) if drawn else space.grid()
        config = _config(context, sweep, room, 1, None)
        _fit(context, space.values, {"sample": tune.grid_search(points)}, config, sweep, folder, room, reporter)


def train_all(
    context: TrialContext,
    points: Sequence[dict[str, Any]],
    sweep: Sweep,
    folder: Path,
    room: TrialResources,
    reporter: Reporter,
) -> None:
    """Train a recipe with each of some sets of values, to the end."""
    schedule = sweep.schedule.model_copy(update={"kind": "none"})
    unlimited = sweep.search.model_copy(update={"hours": None})
    to_the_end = sweep.model_copy(update={"schedule": schedule, "search": unlimited})
    config = _config(context, to_the_end, room, 1, None)
    _fit(context, dict, {"sample": tune.grid_search([*points])}, config, to_the_end, folder, room, reporter)


def _fit(
    context: TrialContext,
    values: Callable[[dict[str, Any]], dict[str, Any]],
    space: dict[str, Any],
    config: tune.TuneConfig,
    sweep: Sweep,
    folder: Path,
    room: TrialResources,
    reporter: Reporter,
) -> None:
    os.environ.update(_SETTINGS)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)

    def trial(sample: dict[str, Any]) -> None:
        use_assigned_gpus()
        use_assigned_threads()
        # Read in this process when the next trial is to have its actor: by 2 s, Ray Tune's own, this one may be about to end.
        os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = "60"
        name, chosen = tune.get_context().get_trial_id(), values(sample.get("sample", sample))
        given = tune.get_checkpoint() if context.exchanges else None
        try:
            with given.as_directory() if given else nullcontext() as donor:
                run_trial(context, name, chosen, _report, Path(donor) if donor else None)
        finally:
            allocator.release_memory()

    trainable = tune.with_resources(trial, room.reserved)
    listener = _Listener(context, reporter)
    if _goes_on(folder):
        tuner = tune.Tuner.restore(to_uri(folder), trainable, resume_errored=False, param_space=space)
        # Ray Tune takes callbacks, which it pickled with the rest, from nowhere else.
        tuner._local_tuner._run_config.callbacks = [listener, *loggers(sweep)]
    else:
        tuner = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=config,
            run_config=tune.RunConfig(
                name=folder.name,
                storage_path=to_uri(folder.parent),
                failure_config=tune.FailureConfig(max_failures=sweep.search.max_failures),
                callbacks=[listener, *loggers(sweep)],
                # Each is a trial's whole state; a trial that goes on from another's asks for a recent one.
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4 if context.exchanges else None),
                verbose=0,
            ),
        )
    tuner.fit()
    for known in read_trials(context.trials):
        if not known.ended:  # under way when `search.hours` were over, or unknown to Ray Tune since its state was torn
            listener.note_end(known.name, "stopped")


def _goes_on(folder: Path) -> bool:
    """Whether a search in a folder can go on.

    State that a killed driver left half written is removed. With it Ray Tune would train one trial and end; without it the
    search begins anew, and values that a finished trial had are not trained again.
    """
    if not tune.Tuner.can_restore(to_uri(folder)):
        return False
    if isinstance(folder, RemotePath):  # objects are whole
        return any(name.startswith("experiment_state-") for name in names(folder))
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
    context: TrialContext, sweep: Sweep, room: TrialResources, samples: int, searcher: Any, space: Space | None = None
) -> tune.TuneConfig:
    hours = sweep.search.hours
    together = isinstance(context.recipe, MutualRecipe)
    return tune.TuneConfig(
        # Who goes on from another's weights gets those of now, not those that were best.
        metric=_NOW if sweep.schedule.kind == "pbt" else _METRIC,
        mode="max",
        search_alg=searcher,
        scheduler=_scheduler(sweep, space),
        num_samples=samples,
        max_concurrent_trials=room.concurrent,
        time_budget_s=None if hours is None else hours * 3600,
        # A group's thread may still train when its trial is stopped, longer than Ray Tune waits before it uses the actor again.
        reuse_actors=room.in_own_process and not together,
        trial_dirname_creator=lambda trial: trial.trial_id,
    )


def _scheduler(sweep: Sweep, space: Space | None) -> Any:
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
            # A list, not a choice: that Ray Tune multiplies by 0.8 and 1.2 like a number.
            hyperparam_mutations={**_domains(space), **space.choices},
            custom_explore_fn=space.clipped,
        )
    return None


def _domains(space: Space) -> dict[str, Any]:
    """Ray Tune's own word for each free knob: PBT draws and changes values by itself."""
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
    """Ray Tune's Optuna searcher: multivariate tree-structured Parzen estimator, trials under way taken for bad ones."""
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


def loggers(sweep: Sweep) -> list[Any]:
    """Ray Tune's own, for those trackers that are asked for.

    Raises:
        RecipeError: A tracker's package is not installed, or W&B knows nobody.
    """
    found: list[Any] = []
    for tracker in sweep.loggers:
        try:
            if tracker == "tensorboard":
                from ray.tune.logger import TBXLoggerCallback

                found.append(TBXLoggerCallback())
            elif tracker == "mlflow":
                from ray.air.integrations.mlflow import MLflowLoggerCallback

                require_mlflow_server("set MLFLOW_TRACKING_URI=http://HOST:5000")
                found.append(MLflowLoggerCallback(experiment_name=sweep.name))
            else:
                from ray.air.integrations.wandb import WandbLoggerCallback

                found.append(WandbLoggerCallback(project=sweep.name))
                found[-1].setup()
        except (ImportError, RuntimeError) as lacking:
            package = {"tensorboard": "tensorboardX"}.get(tracker, tracker)
            raise LoggerSetupError(
                f"trackers has {tracker}, which cannot be used here: {lacking}; pip install {package}"
            ) from None
        except ValueError as refused:
            raise LoggerSetupError(f"trackers has {tracker}, which cannot be used here: {refused}") from None
    return found


class _Listener(tune.Callback):  # type: ignore[misc]
    """In the sweep's process: notes how trials ended, reports them, and passes on the stop request."""

    def __init__(self, context: TrialContext, reporter: Reporter) -> None:
        self._desk = context
        self._reporter = reporter

    def __getstate__(self) -> dict[str, Any]:
        """Ray Tune pickles its settings; a sweep that goes on is given a listener of its own."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        register_trial(self._desk.trials, trial.trial_id)
        self._tell(trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self._tell(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self.note_end(trial.trial_id, "stopped")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        why = trial.error_file and Path(trial.error_file).read_text(encoding="utf-8").strip().splitlines()[-1]
        self.note_end(trial.trial_id, "failed", why or "its process was lost")

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        if self._reporter.stop_requested():
            raise StoppedError

    def note_end(self, name: str, status: Status, why: str = "") -> None:
        """A trial that did not say itself how it ended was ended by Ray Tune."""
        folder = self._desk.trials / name
        known = read_trial(folder)
        if known is not None and not known.ended:
            through = bool(known.reported) and known.reported[-1].progress >= 100
            # One that failed at its end, or whose model is what it was for, is not finished by a score.
            done = through and status == "stopped" and not self._desk.keep_models
            replace(known, status="finished" if done else status, why=why).write(folder)
            clear(folder)
        self._tell(name)

    def _tell(self, name: str) -> None:
        known = read_trial(self._desk.trials / name)
        if known is not None:
            self._reporter.emit(news_of(known))


def news_of(trial: Trial) -> TrialUpdate:
    """What a watcher is told of a trial."""
    last, best = trial.reported[-1] if trial.reported else None, trial.best
    return TrialUpdate(
        trial.name,
        trial.status,
        last.progress if last else 0.0,
        last.score if last else None,
        best.score if best else None,
        trial.values,
        trial.why,
    )
