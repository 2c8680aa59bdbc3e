"""Mutual distillation: bi- and cross-encoders of several language models label sentence pairs for each other."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from distcse.checks import Question, require
from distcse.devices.cluster import Cluster
from distcse.devices.device import DeviceSpeed
from distcse.devices.gpu_plan import PlansOfTrials, Process
from distcse.devices.resources import Node
from distcse.errors import DistcseError, StoppedEarlyError
from distcse.evaluation import Contamination, Tasks
from distcse.events import Event, GroupActivity, GroupEvent, Reporter
from distcse.models import Encoder
from distcse.preflight.precision import Role
from distcse.preflight.warnings import SettingsWarning, report_warnings, warn_of_unused_prompts
from distcse.recipe import KINDS, GroupSection, LoggersSection, MutualRecipe, TrainedSection
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import (
    NodeNeeds,
    gpu_policy,
    joined_for_devices,
    model_memory,
    report_gpus,
    waited_for_nodes,
)
from distcse.runs.directory import RunDirectory, check_storage
from distcse.runs.experiment import (
    TRIALS,
    Experiment,
    TrialGpus,
    Trials,
    TrialScore,
    open_run,
    register_experiment,
)
from distcse.runs.final_evaluation import FinalScores
from distcse.runs.mutual.final_evaluation import contamination_of, final_scores, labelled_tasks
from distcse.runs.mutual.group import Group
from distcse.runs.mutual.label_exchange import LabelExchange
from distcse.runs.mutual.pairs import (
    data_fingerprints,
    fit_to_pairs,
    load_pairs,
    prepare_tokens,
    read_fingerprints,
    temporary_pairs,
)
from distcse.runs.mutual.phase_store import (
    GroupContext,
    Phase,
    PhaseResult,
    PhaseStore,
    best_phase,
    dev_scores,
    last_phase,
)
from distcse.runs.mutual.preflight import load_cross, recipe_questions, rehearse_groups, score_starts
from distcse.runs.mutual.processes import (
    group_needs,
    least_requests,
    plan_groups,
    roles_on,
    with_max_workers,
    with_precisions,
)
from distcse.runs.result import Best, MutualResult, Result
from distcse.storage import ArtifactStore
from distcse.text import Pairs
from distcse.tracking import track_run
from distcse.training.checkpoints import CheckpointStore


@register_experiment(MutualRecipe)
class MutualDistillation(Experiment[MutualRecipe]):
    """Self-distillation of one group, or mutual distillation of several (see `Experiment`)."""

    name = "mutual distillation"

    def rehearse(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
        rehearse_groups(self.recipe, backend, reporter, plans_of_trials)

    def questions(self, begun: RunDirectory | None = None) -> list[Question]:
        return recipe_questions(self.recipe, has_pairs=begun is not None and (begun.store / "pairs").has_folder())

    def settings_warnings(self, only_local: bool = False) -> list[SettingsWarning]:
        groups = {f"groups.{number}": group for number, group in enumerate(self.recipe.groups)}
        return [*super().settings_warnings(), *warn_of_unused_prompts(groups, only_local)]

    def check_resources(self, nodes: Sequence[Node]) -> None:
        plan_groups(self.recipe, self.recipe.groups, nodes)

    @property
    def needs(self) -> NodeNeeds:
        return group_needs(self.recipe, self.recipe.groups)

    def fingerprints(self, reporter: Reporter) -> dict[str, str]:
        return read_fingerprints(self.recipe, reporter)

    def run(self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None) -> MutualResult:
        """Run the recipe; see `Experiment.run`.

        A resumed run skips finished phases, and continues unfinished ones from their last checkpoint with the same labels.
        """
        require(self.questions(directory))
        check_storage(self.recipe.storage)
        tasks = labelled_tasks(self.recipe)
        dropped = PhaseStore(directory.store).dropped if directory else {}
        active = [number for number, group in enumerate(self.recipe.groups) if group.name not in dropped]
        with ExitStack() as scope:
            # Before joining, because a local cluster counts its GPUs as it starts.
            scope.enter_context(gpu_policy(self.recipe.gpu_mode, computes_here=backend.cluster is None))
            scope.enter_context(joined_for_devices(backend.cluster))
            groups = [self.recipe.groups[number] for number in active]
            _check_models(self.recipe, groups, backend, reporter)
            directory, lease, caller = scope.enter_context(open_run(self, backend, reporter, directory))
            requests = least_requests(self.recipe, groups)
            scope.enter_context(waited_for_nodes(backend.cluster, self.recipe, requests, caller))
            ending = threading.Event()
            reporter = replace(caller, stop_requested=lambda: ending.is_set() or caller.stop_requested())
            if lease.has_local_changes:
                for phase in directory.path.glob("groups/*/*"):
                    CheckpointStore(directory.store / str(phase.relative_to(directory.path))).rescue(reporter.emit)
            store, is_recorded = PhaseStore(directory.store), directory.is_recorded()
            recipe = self.recipe if is_recorded else with_max_workers(self.recipe, reporter)
            groups = [recipe.groups[number] for number in active]
            recipe = with_precisions(recipe, backend.cluster, reporter, groups=groups)
            groups = [recipe.groups[number] for number in active]
            plan = partial(plan_groups, recipe, groups)
            report_gpus(backend.cluster, recipe.gpu_mode, lambda nodes: [plan(nodes).gpus], reporter)
            if recipe != self.recipe:
                directory.decide(recipe)
            if not is_recorded or _lacks_starts(recipe, groups, store):
                starts, warnings = score_starts(recipe, groups, backend, reporter)
                store.record_starts(starts)
                report_warnings(warnings, reporter)
            if not is_recorded:
                (directory.store / "pairs").delete_folder()
            pairs = load_pairs(recipe, directory.store, backend, reporter)
            if (fitted := fit_to_pairs(recipe, len(pairs), reporter)) != recipe:
                recipe = fitted
                groups = [recipe.groups[number] for number in active]
                directory.decide(recipe)
            directory.record(recipe.seed, data_fingerprints(recipe, groups, pairs, tasks))
            tokens = prepare_tokens(recipe, groups, pairs, backend, reporter)
            contexts = [
                GroupContext(recipe, number, directory.store, tables)
                for number, tables in zip(active, tokens, strict=True)
            ]
            with track_run(recipe, directory.store, reporter.emit) as tracked:
                reporter = tracked.relay(reporter)
                needs, plan = group_needs(recipe, groups), partial(plan_groups, recipe, groups)
                with (
                    needs.joined(backend.cluster, plan, directory.path) as resources,
                    backend.metered(reporter, directory.path.name) as metered,
                ):
                    reporters = [metered.of_group(group.name) for group in groups]
                    with backend.open_groups(contexts, reporters, resources) as opened:
                        exchange = LabelExchange(recipe, store, ending, caller.stop_requested)
                        interrupted = run_groups(recipe, opened, store, exchange, metered)
                best = [] if interrupted else save_best(recipe, contexts, store)
                final = FinalScores(None, stopped=interrupted)
                if not interrupted:
                    final = final_scores(recipe, tasks, pairs, best, directory, backend, caller)
                tracked.end(final.stopped, final.evaluation)
            final.write(directory.store)
            directory.store_events()
            dropped = store.dropped
            return MutualResult.of(recipe, directory, best, dropped, len(pairs), final.stopped, final.evaluation)

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        return roles_on(self.recipe, {group.name: devices for group in self.recipe.groups}, devices)

    @property
    def trials(self) -> Trials:
        return MutualTrials(self.recipe)


def _lacks_starts(recipe: MutualRecipe, groups: Sequence[GroupSection], store: PhaseStore) -> bool:
    """Return whether the labels need dev scores of starts that are not recorded."""
    return recipe.mutual.weigh_by == "group_and_dev" and any(group.name not in store.starts for group in groups)


def _check_models(recipe: MutualRecipe, groups: Sequence[GroupSection], backend: Backend, reporter: Reporter) -> None:
    """Load each group's models once, before the pairs are mined: without one, the run ends."""
    memory = max(model_memory(group.backbone) for group in groups)
    call = DeviceCall("check of the groups' models", partial(_load_models, recipe, groups), memory)
    backend.run_on_devices([call], group_needs(recipe, groups).options(uses_gpu=False), reporter)


def _load_models(recipe: MutualRecipe, groups: Sequence[GroupSection], reporter: Reporter) -> None:
    for group in groups:
        Encoder.from_section(group)
        if recipe.cross_start(group) != group.backbone:
            load_cross(recipe, group)


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
            group_reporter.warn(f"dropped: {failed.coded_message}")
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
            scores = dev_scores(store, group.name, kind, last_phase(recipe.mutual.cycles))
            best = best_phase(scores)
            copy = context.run / "models" / group.name / kind
            source = context.folder(best) / "model"
            source.fetch_folder()
            with copy.write_folder() as temporary:
                shutil.copytree(source.path, temporary, dirs_exist_ok=True)
            copy.publish()
            results.append(Best(group.name, kind, best, scores[best], copy.path))
    return results


class MutualTrials(Trials):
    """Trials that each train all groups one after the other, in one process (see `Trials`)."""

    searched: MutualRecipe
    leaves_threads = True

    @property
    def processes(self) -> list[Process]:
        return [Process(TRIALS, 1, None, None, None, "a trial", "search.concurrent", {})]

    @property
    def needs(self) -> NodeNeeds:
        return group_needs(self.searched, self.searched.groups, in_sweep=True)

    def train(self, backend: Backend, reporter: Reporter, directory: RunDirectory) -> Result:
        return MutualDistillation(self.searched).run(backend, reporter, directory)

    def recipe(self, cpus: float, gpus: float) -> MutualRecipe:
        evaluation = self.searched.evaluation.model_copy(update={"final_suites": []})
        return self.searched.model_copy(update={"evaluation": evaluation, "loggers": LoggersSection(), "ray": False})

    def with_precisions(self, cluster: Cluster, reporter: Reporter, gpus: TrialGpus) -> MutualRecipe:
        return with_precisions(self.searched, cluster, reporter, gpus.worker)

    def check_labels(self) -> None:
        require(recipe_questions(self.recipe(0, 0)))  # as trials see it: without loggers
        check_storage(self.searched.storage)
        labelled_tasks(self.searched)

    def prepare(self, backend: Backend, reporter: Reporter, sweep: RunDirectory) -> None:
        if self.searched.pairs.mine is None:  # fitted once, for all trials and for best.yaml
            with temporary_pairs(self.searched, reporter) as pairs:
                if (fitted := fit_to_pairs(self.searched, len(pairs), reporter)) != self.searched:
                    sweep.decide(fitted)
                fingerprints = data_fingerprints(self.searched, self.searched.groups, pairs, self.labelled_tasks())
        else:
            fingerprints = read_fingerprints(self.searched, reporter)
        sweep.record(self.searched.seed, fingerprints)

    def scores(self, run: ArtifactStore) -> Callable[[Event], Iterable[TrialScore]]:
        return CycleScores(self.searched, run).of

    def labelled_tasks(self) -> Tasks:
        return labelled_tasks(self.searched)

    def models(self, run: ArtifactStore) -> dict[str, tuple[ArtifactStore, TrainedSection]]:
        return {
            f"{group.name} {kind}": (run / f"models/{group.name}/{kind}", group)
            for group in self.searched.groups
            for kind in KINDS
        }

    def contamination(self, run: ArtifactStore, tasks: Tasks, reporter: Reporter) -> Contamination:
        return contamination_of(self.searched, Pairs.open(run / "pairs"), tasks, reporter)


class CycleScores:
    """Dev scores of a trial, one per cycle: the mean over groups of each group's best bi-encoder so far."""

    def __init__(self, recipe: MutualRecipe, run: ArtifactStore) -> None:
        self._cycles = recipe.mutual.cycles
        self._groups = [group.name for group in recipe.groups]
        self._run = run
        self._scored = 0

    def of(self, event: Event) -> Iterator[TrialScore]:
        """Yield the score of each cycle that has ended since the last call, if the event reports a group's activity."""
        if not isinstance(event, GroupEvent) or not isinstance(event.event, GroupActivity):
            return
        store = PhaseStore(self._run)
        names = [name for name in self._groups if name not in store.dropped]
        while self._scored < self._cycles and names:
            phase = Phase(2 * (self._scored + 1))
            if not all(name in store.posted(phase) for name in names):
                return
            self._scored += 1
            scores = [dev_scores(store, name, "bi", phase) for name in names]
            mean = sum(each[best_phase(each)] or 0.0 for each in scores) / len(scores)
            yield TrialScore(self._scored, 100 * self._scored / self._cycles, mean)
