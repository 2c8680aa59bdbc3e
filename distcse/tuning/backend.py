"""The interface of a sweep's backend: where its trials run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from distcse.data import Corpus
from distcse.events import Reporter
from distcse.experiments.backend import Backend
from distcse.placement.cluster import Cluster
from distcse.recipe import Sweep, TeachersSection
from distcse.teachers.table import EmbeddingTable
from distcse.tuning.space import Space
from distcse.tuning.trial import TrialContext
from distcse.tuning.trial_resources import TrialResources


class StoppedError(Exception):
    """The caller requested a stop. Running trials stay unfinished, and a resumed sweep continues them."""


class SweepBackend(Protocol):
    """Embeds and serves the teachers once for all trials, and runs the trials."""

    @property
    def cluster(self) -> Cluster:
        """The cluster to join for the sweep."""
        ...

    @property
    def run_backend(self) -> Backend:
        """The backend that embeds the corpus."""
        ...

    def serve_trials(
        self,
        section: TeachersSection,
        corpus: Corpus,
        tables: Sequence[EmbeddingTable | None],
        resources: TrialResources,
        reporter: Reporter,
        name: str,
    ) -> AbstractContextManager[Backend]:
        """Start the teachers' servers that all trials share; they end with the block.

        Args:
            section: The teachers.
            corpus: The sentences.
            tables: Each teacher's table, or None for a live teacher.
            resources: Resources of the servers and trials. Trials that train in their own process read the tables themselves.
            reporter: Receives warnings of unresponsive servers.
            name: Name of the sweep, part of the servers' names.

        Returns:
            The context manager of the backend that trains the trials.
        """
        ...

    def search(
        self,
        context: TrialContext,
        space: Space,
        sweep: Sweep,
        folder: Path,
        resources: TrialResources,
        reporter: Reporter,
    ) -> Any:
        """Run a search, or continue the one whose state is in `folder`. The results are in the trials' records.

        Args:
            context: What all trials share.
            space: The parameters to search.
            sweep: The algorithm, the scheduler and the limits.
            folder: Folder of the search's state.
            resources: Resources of a trial, and how many trials run at once.
            reporter: Receives updates of trials; can request a stop.

        Returns:
            What the backend's search library returns: Ray Tune's `ResultGrid`.

        Raises:
            StoppedError: `reporter` requested a stop.
        """
        ...

    def train_all(
        self,
        context: TrialContext,
        points: Sequence[dict[str, Any]],
        sweep: Sweep,
        folder: Path,
        resources: TrialResources,
        reporter: Reporter,
    ) -> None:
        """Train the recipe with each set of values, without a scheduler and without a limit of hours.

        Args:
            context: What all trials share.
            points: Values by recipe path, one entry per trial.
            sweep: The limit of failures.
            folder: Folder of the state, as for `search`.
            resources: As for `search`.
            reporter: As for `search`.

        Raises:
            StoppedError: `reporter` requested a stop.
        """
        ...
