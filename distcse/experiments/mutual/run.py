"""One run of self- or mutual distillation, from a recipe to the best saved models of each group."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from distcse.errors import DistcseError
from distcse.evaluation import Evaluation, Tasks
from distcse.events import Event, GroupActivity, GroupEvent, LogMessage, Reporter, StageProgress, combine_listeners
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.final_evaluation import checked_tasks, final_scores, wanted_tasks
from distcse.experiments.mutual.group import Group, LocalGroup, SerializedGroup
from distcse.experiments.mutual.label_exchange import LabelExchange, RunEnded
from distcse.experiments.mutual.pairs import Pairs, read_pairs
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phase_trainer import GroupContext, PhaseResult
from distcse.experiments.mutual.phases import Kind, Phase, last_phase
from distcse.experiments.mutual.roles import with_precisions
from distcse.models import Encoder, model_fingerprint, resolve_model
from distcse.ray_backend.cluster import cluster, starting_ray
from distcse.recipe import GroupSection, MutualRecipe
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.storage import fetch, fetch_folder, to_uri, upload_dir
from distcse.tracking import require_packages, track_run
from distcse.trainer.checkpoints import CheckpointStore
from distcse.trainer.engines import uses_deepspeed


@dataclass(frozen=True)
class Best:
    """The best model of one group and formulation over all cycles."""

    group: str
    kind: Kind
    phase: Phase
    """The phase that trained the model."""
    dev: float | None
    """Its dev score; None without dev pairs."""
    model: Path
    """Its folder."""


@dataclass(frozen=True)
class MutualResult:
    """Result of a mutual distillation."""

    recipe: MutualRecipe
    directory: RunDirectory
    best: list[Best]
    """The best models; empty if the run was interrupted."""
    dropped: dict[str, str]
    """Groups that failed and were dropped, with the reason."""
    pairs: int
    """Number of pairs."""
    interrupted: bool
    """Whether the run was asked to stop before its end."""
    evaluation: Evaluation | None
    """Evaluation of initial and best models; None if the run was interrupted or has no labelled sets."""


def run_mutual(recipe: MutualRecipe, reporter: Reporter, resume: RunDirectory | None = None) -> MutualResult:
    """Run a recipe, or resume an interrupted or killed run.

    A resumed run skips finished phases, and continues unfinished ones from their last checkpoint with the same labels.

    Args:
        recipe: The recipe to run.
        reporter: Receives events. Its stop request ends the run, with checkpoints.
        resume: The folder of the run to resume; None starts a new run.

    Raises:
        DistcseError: The recipe, the data or the cluster has a problem. Finished phases and checkpoints are kept.
    """
    require_packages(recipe.loggers)
    for section in (recipe.bi, recipe.cross):
        uses_deepspeed(section)  # raises here, rather than after the pairs are mined
    tasks = checked_tasks(recipe)
    dropped = PhaseStore(resume.path).dropped if resume else {}
    active = [number for number, group in enumerate(recipe.groups) if group.name not in dropped]
    for group in (recipe.groups[number] for number in active):
        Encoder.from_section(group)
        resolve_model(group.cross_backbone or group.backbone)
    directory = resume or RunDirectory.create(recipe)
    with directory.leased(reporter) as lease:
        reporter = Reporter(combine_listeners(directory.log, reporter.emit), reporter.stop_requested)
        reporter.emit(LogMessage(f"run directory {to_uri(directory.path)}"))
        with starting_ray(recipe.ray):
            return _run(recipe, reporter, directory, lease, active, tasks)


def _run(
    recipe: MutualRecipe, reporter: Reporter, directory: RunDirectory, lease: Lease, active: list[int], tasks: Tasks
) -> MutualResult:
    ending, stop_requested = threading.Event(), reporter.stop_requested
    reporter = replace(reporter, stop_requested=lambda: ending.is_set() or stop_requested())
    if lease.has_local_changes:
        for phase in (directory.path / "groups").glob("*/*"):
            CheckpointStore(phase).rescue(reporter.emit)
    requested, recipe = recipe, with_precisions(recipe, reporter)
    if recipe != requested:
        directory.decide(recipe)
    pairs = _load_pairs(recipe, directory.path, reporter)
    directory.record(recipe.seed, data_fingerprints(recipe, [recipe.groups[number] for number in active], pairs, tasks))
    store = PhaseStore(directory.path, lease)
    store.record_pairs(pairs.fingerprint)
    contexts = [GroupContext(recipe, number, directory.path, lease) for number in active]
    best, evaluation = [], None
    with track_run(recipe, directory.path, reporter.emit) as tracked:
        with _open_groups(recipe, contexts, tracked.relay(reporter)) as (groups, groups_reporter):
            exchange = LabelExchange(recipe, store, ending, stop_requested)
            interrupted = _run_groups(recipe, groups, store, exchange, groups_reporter)
        if not interrupted:
            best = _save_best(recipe, contexts, store)
            models = [(result.group, result.kind, result.model) for result in best]
            evaluation = final_scores(recipe, tasks, pairs, models, reporter.emit)
        tracked.end(interrupted, evaluation)
    if evaluation is not None:
        evaluation.write(directory.evaluation)
    directory.store_events()
    return MutualResult(recipe, directory, best, dict(store.dropped), len(pairs), interrupted, evaluation)


def data_fingerprints(
    recipe: MutualRecipe, groups: Sequence[GroupSection], pairs: Pairs, tasks: Tasks
) -> dict[str, str]:
    """Fingerprint the pairs, the dev set, the models and the test sets, by name.

    Args:
        recipe: The recipe.
        groups: The groups whose models to include.
        pairs: The run's pairs.
        tasks: The labelled test sets.
    """
    fingerprints = {"pairs": pairs.fingerprint}
    if (dev := DevPairs.of(recipe)) is not None:
        fingerprints["dev set"] = dev.fingerprint
    for group in groups:
        model = resolve_model(group.backbone, group.trust_remote_code)
        fingerprints[f"model of {group.name}"] = model_fingerprint(model)
        if group.cross_backbone is not None:
            cross_model = resolve_model(group.cross_backbone, group.trust_remote_code)
            fingerprints[f"cross model of {group.name}"] = model_fingerprint(cross_model)
    return {**fingerprints, **tasks.fingerprints()}


def read_fingerprints(recipe: MutualRecipe) -> dict[str, str]:
    """Read the pairs and the labelled sets, and fingerprint them and the models. Pairs to be mined are left out."""
    is_mined = recipe.pairs.mine is not None
    pairs = Pairs([], []) if is_mined else read_pairs(recipe)
    fingerprints = data_fingerprints(recipe, recipe.groups, pairs, wanted_tasks(recipe))
    return {name: value for name, value in fingerprints.items() if not (is_mined and name == "pairs")}


def _load_pairs(recipe: MutualRecipe, run: Path, reporter: Reporter) -> Pairs:
    """Load the run's pairs. A new run reads or mines them first, and stores them."""
    file = run / "pairs.parquet"
    if not fetch(file):
        if recipe.pairs.mine is None:
            pairs = read_pairs(recipe)
        else:
            from distcse.experiments.mutual.mining import mine_pairs

            pairs = mine_pairs(recipe, reporter.emit)
        pairs.write(file)
    pairs = Pairs.read(file)
    reporter.emit(
        StageProgress("pairs", len(pairs), len(pairs), "pairs", finished=True, note=f"{len(pairs):,} different pairs")
    )
    return pairs


@contextmanager
def _open_groups(
    recipe: MutualRecipe, contexts: list[GroupContext], reporter: Reporter
) -> Iterator[tuple[list[Group], Reporter]]:
    """Create the groups, in this process or on Ray, and close them at the end.

    Yields:
        The groups, and the reporter for their events.
    """
    if not recipe.ray:
        lock = threading.Lock()
        yield (
            [
                SerializedGroup(
                    LocalGroup(context, _group_reporter(reporter, context.group.name)), lock, reporter.stop_requested
                )
                for context in contexts
            ],
            reporter,
        )
        return
    with cluster():
        from distcse.experiments.mutual.actors import (  # Ray reads its settings when it is imported
            RayGroup,
            resources_of,
        )
        from distcse.experiments.mutual.gpus import lost_gpus_of_groups
        from distcse.ray_backend.metrics import metered
        from distcse.ray_backend.nodes import alive
        from distcse.ray_backend.shared_storage import require_shared

        active = [context.group for context in contexts]
        per_worker = resources_of(active)
        for warning in lost_gpus_of_groups(recipe, active, per_worker, alive()):
            reporter.emit(LogMessage(warning, warning=True))
        run = contexts[0].run
        require_shared({"storage.runs": run}, read_by_groups(recipe), [group.node_labels for group in active])
        reporter = metered(reporter, run.name)
        groups: list[Group] = []
        try:
            for context, resources in zip(contexts, per_worker, strict=True):
                groups.append(RayGroup(context, _group_reporter(reporter, context.group.name), resources))
            yield groups, reporter
        finally:
            for group in groups:
                group.close()


def read_by_groups(recipe: MutualRecipe) -> dict[str, Path]:
    """Map recipe keys to the paths that actors read. Names of hub models are included, as paths that do not exist."""
    backbones = {f"groups.{number}.backbone": Path(group.backbone) for number, group in enumerate(recipe.groups)}
    cross = {n: group.cross_backbone for n, group in enumerate(recipe.groups) if group.cross_backbone is not None}
    data = {"evaluation.data": Path(recipe.evaluation.data)} if recipe.evaluation.data is not None else {}
    dev = {"evaluation.dev": Path(recipe.evaluation.dev)}
    return {**backbones, **{f"groups.{n}.cross_backbone": Path(name) for n, name in cross.items()}, **data, **dev}


def _run_groups(
    recipe: MutualRecipe, groups: list[Group], store: PhaseStore, exchange: LabelExchange, reporter: Reporter
) -> bool:
    """Run each group in a thread until all have finished. Return whether they were asked to stop before their end."""
    stopped = [False] * len(groups)

    def run_group(number: int) -> None:
        group = groups[number]
        group_reporter = _group_reporter(reporter, group.name)
        try:
            stopped[number] = not _run_phases(recipe, group, store, exchange, group_reporter)
            if stopped[number]:
                exchange.end()  # wake the groups that wait for this one's scores
        except RunEnded:
            stopped[number] = True
            exchange.end()  # wake the groups that wait for this one's scores
        except DistcseError as failed:
            if recipe.mutual.on_failure == "stop" or not exchange.drop(group.name, failed.coded_message):
                raise
            group.close()
            group_reporter.emit(LogMessage(f"dropped: {failed.coded_message}", warning=True))
            group_reporter.emit(GroupActivity("", "dropped"))

    def run_group_or_end(number: int) -> None:
        try:
            run_group(number)
        except BaseException:
            exchange.end()
            raise

    threads = ThreadPoolExecutor(max_workers=len(groups), thread_name_prefix="group")
    futures = [threads.submit(run_group_or_end, number) for number in range(len(groups))]
    is_interrupted = False
    try:
        for future in futures:
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
            previous = Phase(number - 1)
            if missing := exchange.missing(previous):
                reporter.emit(GroupActivity(phase.name, "waiting", missing, number))
            labels = exchange.labels(previous)
            if labels is None:
                break
            reporter.emit(GroupActivity(phase.name, "training", phase_index=number))
            trained = group.train(phase, labels)
            if trained is None:
                return False
        reporter.emit(GroupActivity(phase.name, "scoring", phase_index=number))
        exchange.post(group.name, phase, group.score(phase), trained)
    reporter.emit(GroupActivity("", "finished"))
    return True


def _save_best(recipe: MutualRecipe, contexts: list[GroupContext], store: PhaseStore) -> list[Best]:
    """Copy the best model of each group and formulation to `models/`, by dev score; without dev pairs the last model."""
    results: list[Best] = []
    kinds: tuple[Kind, ...] = ("bi", "cross")
    for context in contexts:
        group = context.group
        if group.name in store.dropped:
            continue
        phases = [Phase(n) for n in range(1, last_phase(recipe.mutual.cycles).number + 1)]
        for kind in kinds:
            scores = {
                phase: store.posted(phase)[group.name]["dev"]
                for phase in phases
                if group.name in store.posted(phase) and phase.kind == kind
            }
            best = max(
                scores,
                key=lambda phase: (scores[phase] if scores[phase] is not None else phase.number, -phase.number),
            )
            target = context.run / "models" / group.name / kind
            shutil.rmtree(target, ignore_errors=True)
            fetch_folder(context.folder(best) / "model")
            shutil.copytree(context.folder(best) / "model", target)
            upload_dir(target)
            results.append(Best(group.name, kind, best, scores[best], target))
    return results


def _group_reporter(reporter: Reporter, name: str) -> Reporter:
    """Return a reporter that wraps events in a `GroupEvent` with the group's name."""

    def emit(event: Event) -> None:
        reporter.emit(event if isinstance(event, GroupEvent) else GroupEvent(name, event))

    return Reporter(emit, reporter.stop_requested)
