"""One run of self- or mutual distillation: pairs, groups side by side, cycles, and the best of each formulation."""

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
from distcse.events import Event, GroupActivity, GroupEvent, LogMessage, Reporter, StageProgress, one_by_one
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
from distcse.ray_backend.cluster import cluster, coming_up
from distcse.recipe import GroupSection, MutualRecipe
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.storage import fetch, fetch_folder, to_uri, upload_dir
from distcse.tracking import require_packages, tracking
from distcse.trainer.checkpoints import CheckpointStore
from distcse.trainer.engines import uses_deepspeed


@dataclass(frozen=True)
class Best:
    """The best model of one formulation of one group, over all cycles."""

    group: str
    kind: Kind
    phase: Phase
    dev: float | None
    model: Path


@dataclass(frozen=True)
class MutualResult:
    """What a run leaves behind."""

    recipe: MutualRecipe
    directory: RunDirectory
    best: list[Best]
    dropped: dict[str, str]
    """Groups that could not go on, and why."""
    pairs: int
    interrupted: bool
    evaluation: Evaluation | None


def run_mutual(recipe: MutualRecipe, reporter: Reporter, resume: RunDirectory | None = None) -> MutualResult:
    """Carry out a recipe, or go on with a run that was interrupted or killed.

    Every phase that was finished stays finished; one that was under way goes on from its last checkpoint, with the same
    labels. Raises a `DistcseError` that names what to mend.
    """
    require_packages(recipe.loggers)
    for section in (recipe.bi, recipe.cross):
        uses_deepspeed(section)  # refused now rather than after the pairs
    tasks = checked_tasks(recipe)
    dropped = PhaseStore(resume.path).dropped if resume else {}
    at_work = [number for number, group in enumerate(recipe.groups) if group.name not in dropped]
    for group in (recipe.groups[number] for number in at_work):
        Encoder.from_section(group)
        resolve_model(group.cross_backbone or group.backbone)
    directory = resume or RunDirectory.create(recipe)
    with directory.leased(reporter) as lease:
        reporter = Reporter(one_by_one(directory.log, reporter.emit), reporter.stop_requested)
        reporter.emit(LogMessage(f"run directory {to_uri(directory.path)}"))
        with coming_up(recipe.ray):
            return _run(recipe, reporter, directory, lease, at_work, tasks)


def _run(
    recipe: MutualRecipe, reporter: Reporter, directory: RunDirectory, lease: Lease, at_work: list[int], tasks: Tasks
) -> MutualResult:
    ending, wished = threading.Event(), reporter.stop_requested
    reporter = replace(reporter, stop_requested=lambda: ending.is_set() or wished())
    if lease.left_here:
        for phase in (directory.path / "groups").glob("*/*"):
            CheckpointStore(phase).rescue(reporter.emit)
    asked, recipe = recipe, with_precisions(recipe, reporter)
    if recipe != asked:
        directory.decide(recipe)
    pairs = _pairs(recipe, directory.path, reporter)
    directory.record(recipe.seed, data_of(recipe, [recipe.groups[number] for number in at_work], pairs, tasks))
    ledger = PhaseStore(directory.path, lease)
    ledger.begin(pairs.fingerprint)
    benches = [GroupContext(recipe, number, directory.path, lease) for number in at_work]
    best, evaluation = [], None
    with tracking(recipe, directory.path, reporter.emit) as tracked:
        with _groups(recipe, benches, tracked.relay(reporter)) as (groups, heard):
            exchange = LabelExchange(recipe, ledger, ending, wished)
            interrupted = _side_by_side(recipe, groups, ledger, exchange, heard)
        if not interrupted:
            best = _best(recipe, benches, ledger)
            models = [(one.group, one.kind, one.model) for one in best]
            evaluation = final_scores(recipe, tasks, pairs, models, reporter.emit)
        tracked.end(interrupted, evaluation)
    if evaluation is not None:
        evaluation.write(directory.evaluation)
    directory.store_events()
    return MutualResult(recipe, directory, best, dict(ledger.dropped), len(pairs), interrupted, evaluation)


def data_of(recipe: MutualRecipe, groups: Sequence[GroupSection], pairs: Pairs, tasks: Tasks) -> dict[str, str]:
    """Fingerprints of all that decides what groups learn, by what they are of: pairs, dev set, models, test sets."""
    found = {"pairs": pairs.fingerprint}
    if (dev := DevPairs.of(recipe)) is not None:
        found["dev set"] = dev.fingerprint
    for group in groups:
        found[f"model of {group.name}"] = model_fingerprint(resolve_model(group.backbone, group.trust_remote_code))
        if group.cross_backbone is not None:
            crossed = resolve_model(group.cross_backbone, group.trust_remote_code)
            found[f"cross model of {group.name}"] = model_fingerprint(crossed)
    return {**found, **tasks.fingerprints()}


def data_before(recipe: MutualRecipe) -> dict[str, str]:
    """The same before a run; pairs that are mined are known only when they are."""
    mined = recipe.pairs.mine is not None
    pairs = Pairs([], []) if mined else read_pairs(recipe)
    found = data_of(recipe, recipe.groups, pairs, wanted_tasks(recipe))
    return {name: mark for name, mark in found.items() if not (mined and name == "pairs")}


def _pairs(recipe: MutualRecipe, run: Path, reporter: Reporter) -> Pairs:
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
def _groups(
    recipe: MutualRecipe, benches: list[GroupContext], reporter: Reporter
) -> Iterator[tuple[list[Group], Reporter]]:
    """The groups, and the reporter of their events."""
    if not recipe.ray:
        turn = threading.Lock()
        yield (
            [
                SerializedGroup(LocalGroup(bench, _in_group(reporter, bench.group.name)), turn, reporter.stop_requested)
                for bench in benches
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

        at_work = [bench.group for bench in benches]
        wants = resources_of(at_work)
        for warning in lost_gpus_of_groups(recipe, at_work, wants, alive()):
            reporter.emit(LogMessage(warning, warning=True))
        require_shared(
            {"storage.runs": benches[0].run}, read_by_groups(recipe), [group.node_labels for group in at_work]
        )
        reporter = metered(reporter, benches[0].run.name)
        groups: list[Group] = []
        try:
            for bench, want in zip(benches, wants, strict=True):
                groups.append(RayGroup(bench, _in_group(reporter, bench.group.name), want))
            yield groups, reporter
        finally:
            for group in groups:
                group.close()


def read_by_groups(recipe: MutualRecipe) -> dict[str, Path]:
    """Files and folders that a recipe names and its actors read, by knob; hub ids are among them, and are no files."""
    read = {f"groups.{number}.backbone": Path(group.backbone) for number, group in enumerate(recipe.groups)}
    crossed = {n: group.cross_backbone for n, group in enumerate(recipe.groups) if group.cross_backbone is not None}
    data = {"evaluation.data": Path(recipe.evaluation.data)} if recipe.evaluation.data is not None else {}
    dev = {"evaluation.dev": Path(recipe.evaluation.dev)}
    return {**read, **{f"groups.{n}.cross_backbone": Path(name) for n, name in crossed.items()}, **data, **dev}


def _side_by_side(
    recipe: MutualRecipe, groups: list[Group], ledger: PhaseStore, exchange: LabelExchange, reporter: Reporter
) -> bool:
    """A thread a group, until all are through; whether they were asked to stop before."""
    stops = [False] * len(groups)

    def follow(number: int) -> None:
        group = groups[number]
        own = _in_group(reporter, group.name)
        try:
            stops[number] = not _through(recipe, group, ledger, exchange, own)
            if stops[number]:
                exchange.end()  # whoever waits for this one's scores waits in vain
        except RunEnded:
            stops[number] = True
            exchange.end()  # wake the groups that wait for this one's scores
        except DistcseError as failed:
            if recipe.mutual.on_failure == "stop" or not exchange.drop(group.name, failed.coded_message):
                raise
            group.close()
            own.emit(LogMessage(f"dropped: {failed.coded_message}", warning=True))
            own.emit(GroupActivity("", "dropped"))

    def follow_or_end(number: int) -> None:
        try:
            follow(number)
        except BaseException:
            exchange.end()
            raise

    threads = ThreadPoolExecutor(max_workers=len(groups), thread_name_prefix="group")
    following = [threads.submit(follow_or_end, number) for number in range(len(groups))]
    hurried = False
    try:
        for future in following:
            future.result()
    except KeyboardInterrupt:  # the second Ctrl-C: groups are closed under their threads
        hurried = True
        raise
    finally:
        exchange.end()
        threads.shutdown(wait=not hurried)
    return any(stops)


def _through(
    recipe: MutualRecipe, group: Group, ledger: PhaseStore, exchange: LabelExchange, reporter: Reporter
) -> bool:
    """Take a group through all phases that it has not been through; False when the run was asked to stop."""
    last = last_phase(recipe.mutual.cycles)
    for number in range(last.number + 1):
        phase = Phase(number)
        if group.name in ledger.posted(phase):
            continue
        trained: PhaseResult | None = None
        if number:
            reporter.emit(GroupActivity(phase.name, "preparing", number=number))
            group.prepare(phase)
            before = Phase(number - 1)
            if missing := exchange.missing(before):
                reporter.emit(GroupActivity(phase.name, "waiting", missing, number))
            labels = exchange.labels(before)
            if labels is None:
                break
            reporter.emit(GroupActivity(phase.name, "training", number=number))
            trained = group.train(phase, labels)
            if trained is None:
                return False
        reporter.emit(GroupActivity(phase.name, "scoring", number=number))
        exchange.post(group.name, phase, group.score(phase), trained)
    reporter.emit(GroupActivity("", "finished"))
    return True


def _best(recipe: MutualRecipe, benches: list[GroupContext], ledger: PhaseStore) -> list[Best]:
    """The best cycle of each formulation of each group by dev score (the last one without), copied to `models/`."""
    found: list[Best] = []
    kinds: tuple[Kind, ...] = ("bi", "cross")
    for bench in benches:
        group = bench.group
        if group.name in ledger.dropped:
            continue
        phases = [Phase(n) for n in range(1, last_phase(recipe.mutual.cycles).number + 1)]
        for kind in kinds:
            scored = {
                p: ledger.posted(p)[group.name]["dev"]
                for p in phases
                if group.name in ledger.posted(p) and p.kind == kind
            }
            best = max(scored, key=lambda p: (scored[p] if scored[p] is not None else p.number, -p.number))
            target = bench.run / "models" / group.name / kind
            shutil.rmtree(target, ignore_errors=True)
            fetch_folder(bench.folder(best) / "model")
            shutil.copytree(bench.folder(best) / "model", target)
            upload_dir(target)
            found.append(Best(group.name, kind, best, scored[best], target))
    return found


def _in_group(reporter: Reporter, name: str) -> Reporter:
    def post(event: Event) -> None:
        reporter.emit(event if isinstance(event, GroupEvent) else GroupEvent(name, event))

    return Reporter(post, reporter.stop_requested)
