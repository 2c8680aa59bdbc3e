"""What every run does around its work: it creates its folder, holds the folder's lease, logs events and joins the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from distcse.checks import require
from distcse.errors import StoppedEarlyError
from distcse.events import LogMessage, Reporter, combine_listeners
from distcse.preflight.models import model_questions
from distcse.preflight.warnings import report_warnings
from distcse.runs.backend import Backend
from distcse.runs.cluster_fit import gpu_policy
from distcse.runs.directory import RunDirectory
from distcse.runs.experiment import Experiment
from distcse.runs.lease import Lease
from distcse.storage import to_uri


class RunScope(NamedTuple):
    """An open run."""

    directory: RunDirectory
    lease: Lease
    reporter: Reporter
    """Also logs the events in the run's folder."""


@contextmanager
def open_run(
    experiment: Experiment[Any],
    backend: Backend,
    reporter: Reporter,
    directory: RunDirectory | None,
    is_trial: bool = False,
) -> Iterator[RunScope]:
    """Context manager: hold the lease of a run's folder, and start the backend's cluster in the background.

    GPUs are hidden from this process if the recipe wants none. Reports the warnings of the recipe's settings.

    Args:
        experiment: The run's experiment.
        backend: Where the work runs.
        reporter: Receives events.
        directory: The folder of an interrupted run; None creates one.
        is_trial: Whether a sweep starts the run, which has checked its models and GPUs and reported its warnings.
            Default: False.

    Raises:
        EncoderError: A model of a new run is missing, or a setting does not fit it.
        RunInUseError: Another process works in the folder.
        ClusterTooSmallError: `resources.gpu` is `required`, and this process must train and sees no GPU.
    """
    recipe = experiment.recipe
    with ExitStack() as scope:
        scope.enter_context(gpu_policy(recipe.gpu_mode, computes_here=backend.cluster is None and not is_trial))
        is_new = directory is None
        if is_new and not is_trial:
            require(model_questions(recipe, fetch=True))
        directory = directory or RunDirectory.create(recipe)
        lease = scope.enter_context(directory.leased(reporter))
        if is_new and recipe.storage.run_id is not None:
            directory.request(recipe)
        reporter = Reporter(combine_listeners(directory.log, reporter.emit), reporter.stop_requested)
        reporter.emit(LogMessage(f"run directory {to_uri(directory.path)}"))
        scope.enter_context(backend.cluster.starting() if backend.cluster else nullcontext())
        if not is_trial:
            # A begun run has its models, apart from those that it has given up.
            report_warnings(experiment.settings_warnings(only_local=not is_new), reporter)
        try:
            yield RunScope(directory, lease, reporter)
        except StoppedEarlyError as stopped:
            if not is_trial:
                stopped.run = to_uri(directory.path)  # a family's own, after its student's
            raise
