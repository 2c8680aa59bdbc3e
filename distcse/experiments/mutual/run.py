"""Runs the groups of a mutual distillation until their last phase, and saves the best models of each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from distcse.errors import DistcseError, StoppedEarlyError
from distcse.events import GroupActivity, LogMessage, Reporter
from distcse.experiments.backend import Backend
from distcse.experiments.mutual.group import Group
from distcse.experiments.mutual.joining import joined_for_groups
from distcse.experiments.mutual.label_exchange import LabelExchange
from distcse.experiments.mutual.phase_store import PhaseStore, best_phase, dev_scores
from distcse.experiments.mutual.phase_trainer import GroupContext, PhaseResult
from distcse.experiments.mutual.phases import Phase, last_phase
from distcse.experiments.mutual.result import Best
from distcse.models import Encoder
from distcse.recipe import KINDS, MutualRecipe
from distcse.storage import open_store


@contextmanager
def open_groups(
    recipe: MutualRecipe, contexts: Sequence[GroupContext], backend: Backend, reporter: Reporter
) -> Iterator[tuple[list[Group], Reporter]]:
    """Start the groups on the backend, and close them at the end.

    Yields:
        The groups, and the reporter for their events.
    """
    active, run = [context.group for context in contexts], contexts[0].run
    with joined_for_groups(recipe, active, backend.cluster, run.path) as resources:
        reporter = backend.metered(reporter, run.name)
        reporters = [reporter.of_group(group.name) for group in active]
        with backend.open_groups(contexts, reporters, resources) as groups:
            yield groups, reporter


def run_groups(
    recipe: MutualRecipe, groups: list[Group], store: PhaseStore, exchange: LabelExchange, reporter: Reporter
) -> bool:
    """Run each group in a thread until all have finished. Return whether they were asked to stop before their end."""
    stopped = [False] * len(groups)

    def run_group(number: int) -> None:
        group = groups[number]
        group_reporter = reporter.of_group(group.name)
        try:
            stopped[number] = not _run_phases(recipe, group, store, exchange, group_reporter)
            if stopped[number]:
                exchange.end()  # wake the groups that wait for this one's scores
        except StoppedEarlyError:
            stopped[number] = True
            exchange.end()  # wake the groups that wait for this one's scores
        except DistcseError as failed:
            can_drop = failed.is_own_failure and recipe.mutual.on_failure == "drop"
            if not (can_drop and exchange.drop(group.name, failed.coded_message)):
                raise
            group_reporter.emit(LogMessage(f"dropped: {failed.coded_message}", warning=True))
            group_reporter.emit(GroupActivity("", "dropped"))

    def run_group_or_end(number: int) -> None:
        try:
            run_group(number)
        except BaseException:
            exchange.end()
            raise
        finally:
            groups[number].close()

    threads = ThreadPoolExecutor(max_workers=len(groups), thread_name_prefix="group")
    is_interrupted = False
    try:
        for future in [threads.submit(run_group_or_end, number) for number in range(len(groups))]:
            future.result()
    except KeyboardInterrupt:  # a second Ctrl-C closes the groups without waiting for their threads
        is_interrupted = True
        raise
    finally:
        exchange.end()
        threads.shutdown(wait=not is_interrupted)
    return any(stopped)


def _run_phases(
    recipe: MutualRecipe, group: Group, store: PhaseStore, exchange: LabelExchange, reporter: Reporter
) -> bool:
    """Run a group's unfinished phases. Return False if the run was asked to stop."""
    last = last_phase(recipe.mutual.cycles)
    for number in range(last.number + 1):
        phase = Phase(number)
        if group.name in store.posted(phase):
            continue
        trained: PhaseResult | None = None
        if number:
            reporter.emit(GroupActivity(phase.name, "preparing", phase_index=number))
            group.prepare(phase)
            if not exchange.has_labels(phase):
                reporter.emit(GroupActivity(phase.name, "waiting", exchange.missing(Phase(number - 1)), number))
        group.acquire(phase, partial(exchange.has_labels, phase))
        if number:
            labels = exchange.labels(group.name, phase)
            if labels is None:
                break
            reporter.emit(GroupActivity(phase.name, "training", phase_index=number))
            trained = group.train(phase, labels)
            if trained is None:
                return False
        reporter.emit(GroupActivity(phase.name, "scoring", phase_index=number))
        exchange.post(group.name, phase, group.score(phase), trained)
        group.release()
    reporter.emit(GroupActivity("", "finished"))
    return True


def save_best(recipe: MutualRecipe, contexts: list[GroupContext], store: PhaseStore) -> list[Best]:
    """Save the best model of each group and formulation in `models/`, by dev score; without dev pairs the last model."""
    results: list[Best] = []
    for context in contexts:
        group = context.group
        if group.name in store.dropped:
            continue
        for kind in KINDS:
            scores = dev_scores(recipe, store, group.name, kind)
            best = best_phase(scores)
            copy = context.run / "models" / group.name / kind
            with copy.write_folder() as temporary:
                if best.number:
                    source = open_store(context.folder(best) / "model")
                    source.fetch_folder()
                    shutil.copytree(source.path, temporary, dirs_exist_ok=True)
                else:
                    Encoder.from_section(group).eval().save(temporary)
            copy.publish()
            results.append(Best(group.name, kind, best, scores[best], copy.path))
    return results
