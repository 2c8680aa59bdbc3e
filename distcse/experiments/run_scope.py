"""What every run does around its work: it creates its folder, holds the folder's lease, logs events and joins the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from distcse.events import LogMessage, Reporter, combine_listeners
from distcse.experiments.backend import Backend
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
    recipe: BaseRecipe, backend: Backend, reporter: Reporter, directory: RunDirectory | None
) -> Iterator[RunScope]:
    """Context manager: hold the lease of a run's folder, and start the backend's cluster in the background.

    Args:
        recipe: The recipe to run.
        backend: Where the work runs.
        reporter: Receives events.
        directory: The folder of an interrupted run; None creates one.

    Raises:
        RunInUseError: Another process works in the folder.
    """
    directory = directory or RunDirectory.create(recipe)
    with directory.leased(reporter) as lease:
        reporter = Reporter(combine_listeners(directory.log, reporter.emit), reporter.stop_requested)
        reporter.emit(LogMessage(f"run directory {to_uri(directory.path)}"))
        with backend.cluster.starting() if backend.cluster else nullcontext():
            yield RunScope(directory, lease, reporter)
