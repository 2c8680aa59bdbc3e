"""What every run does around its work: it creates its folder, holds the folder's lease, logs events and joins the cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

from distcse.checks import require
from distcse.errors import StoppedEarlyError
from distcse.events import LogMessage, Reporter, combine_listeners
from distcse.experiments.backend import Backend
from distcse.experiments.experiment import Experiment
from distcse.experiments.gpu_policy import gpu_policy
from distcse.placement.cluster import Cluster
from distcse.placement.resources import ResourceRequest
from distcse.preflight.models import model_questions
from distcse.preflight.warnings import report_warnings
from distcse.recipe import BaseRecipe
from distcse.runs.directory import RunDirectory
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
    experiment: Experiment[Any], backend: Backend, reporter: Reporter, directory: RunDirectory | None
) -> Iterator[RunScope]:
    """Context manager: hold the lease of a run's folder, and start the backend's cluster in the background.

    GPUs are hidden from this process if the recipe wants none. Reports the warnings of the recipe's settings, but not in a
    sweep's trials: the sweep has reported them.

    Args:
        experiment: The run's experiment.
        backend: Where the work runs.
        reporter: Receives events.
        directory: The folder of an interrupted run; None creates one.

    Raises:
        EncoderError: A model of a new run is missing, or a setting does not fit it.
        RunInUseError: Another process works in the folder.
        ClusterTooSmallError: `resources.gpu` is `required`, and this process must train and sees no GPU.
    """
    recipe = experiment.recipe
    with ExitStack() as scope:
        computes_here = backend.cluster is None and not backend.is_for_trials
        scope.enter_context(gpu_policy(recipe.gpu_mode, computes_here))
        is_new = directory is None
        if is_new and not backend.is_for_trials:
            require(model_questions(recipe, fetch=True))
        directory = directory or RunDirectory.create(recipe)
        lease = scope.enter_context(directory.leased(reporter))
        if is_new and recipe.storage.run_id is not None:
            directory.request(recipe)
        reporter = Reporter(combine_listeners(directory.log, reporter.emit), reporter.stop_requested)
        reporter.emit(LogMessage(f"run directory {to_uri(directory.path)}"))
        scope.enter_context(backend.cluster.starting() if backend.cluster else nullcontext())
        if not backend.is_for_trials:
            # A begun run has its models, apart from those that it has given up.
            report_warnings(experiment.settings_warnings(only_local=not is_new), reporter)
        try:
            yield RunScope(directory, lease, reporter)
        except StoppedEarlyError as stopped:
            if not backend.is_for_trials:
                stopped.run = to_uri(directory.path)  # a family's own, after its student's
            raise


def waited_for_nodes(
    cluster: Cluster | None, recipe: BaseRecipe, requests: Sequence[ResourceRequest], reporter: Reporter
) -> AbstractContextManager[None]:
    """Wait `resources.wait_s` seconds for a cluster's autoscaler to start nodes; see `Cluster.scaled_up`."""
    return nullcontext() if cluster is None else cluster.scaled_up(requests, recipe.resources.wait_s, reporter)


def joined_for_devices(cluster: Cluster | None) -> AbstractContextManager[None]:
    """Join the cluster for the block if `Backend.run_on_devices` may use it, so that all calls and the training share it.

    A cluster of this machine without a GPU is not joined: its functions run in this process, after Ray has ended.
    """
    return nullcontext() if cluster is None or cluster.is_one_cpu() else cluster.joined()
