"""Mutual distillation: bi- and cross-encoders of several language models label sentence pairs for each other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from distcse.checks import Question, require
from distcse.device import DeviceSpeed
from distcse.events import Reporter
from distcse.experiments.backend import Backend, DeviceCall
from distcse.experiments.devices import model_memory
from distcse.experiments.experiment import Experiment, register_experiment
from distcse.experiments.gpu_policy import gpu_policy
from distcse.experiments.mutual.devices import device_options
from distcse.experiments.mutual.final_evaluation import checked_tasks, final_scores
from distcse.experiments.mutual.fingerprints import data_fingerprints, read_fingerprints
from distcse.experiments.mutual.label_exchange import LabelExchange
from distcse.experiments.mutual.max_workers import with_max_workers
from distcse.experiments.mutual.pairs import fit_to_pairs, load_pairs
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phase_trainer import GroupContext
from distcse.experiments.mutual.preflight import check_groups, load_models, recipe_questions
from distcse.experiments.mutual.resources import least_requests, plan_groups, report_gpus
from distcse.experiments.mutual.result import MutualResult
from distcse.experiments.mutual.roles import roles_on, with_precisions
from distcse.experiments.mutual.run import open_groups, run_groups, save_best
from distcse.experiments.mutual.start_scores import score_starts
from distcse.experiments.mutual.tokens import prepare_tokens
from distcse.experiments.mutual.trials import MutualTrials
from distcse.experiments.run_scope import joined_for_devices, open_run, waited_for_nodes
from distcse.experiments.stoppable_evaluation import FinalScores
from distcse.placement.gpu_plan import PlansOfTrials
from distcse.placement.resources import Node
from distcse.precision import Role
from distcse.preflight.warnings import SettingsWarning, report_warnings, warn_of_unused_prompts
from distcse.recipe import GroupSection, MutualRecipe
from distcse.runs.directory import RunDirectory, check_storage
from distcse.tracking import track_run
from distcse.trainer.checkpoints import CheckpointStore


@register_experiment(MutualRecipe)
class MutualDistillation(Experiment[MutualRecipe]):
    """Self-distillation of one group, or mutual distillation of several (see `Experiment`)."""

    name = "mutual distillation"

    def check(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
        with gpu_policy(self.recipe.gpu_mode, computes_here=backend.cluster is None):
            report_warnings(self.settings_warnings(), reporter)
            check_groups(self.recipe, backend, reporter, plans_of_trials)

    def questions(self, begun: RunDirectory | None = None) -> list[Question]:
        return recipe_questions(self.recipe, has_pairs=begun is not None and (begun.store / "pairs").has_folder())

    def settings_warnings(self, only_local: bool = False) -> list[SettingsWarning]:
        groups = {f"groups.{number}": group for number, group in enumerate(self.recipe.groups)}
        return [*super().settings_warnings(), *warn_of_unused_prompts(groups, only_local)]

    def check_resources(self, nodes: Sequence[Node]) -> None:
        plan_groups(self.recipe, self.recipe.groups, nodes)

    def fingerprints(self, reporter: Reporter) -> dict[str, str]:
        return read_fingerprints(self.recipe, reporter)

    def run(self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None) -> MutualResult:
        """Run the recipe; see `Experiment.run`.

        A resumed run skips finished phases, and continues unfinished ones from their last checkpoint with the same labels.
        """
        require(self.questions(directory))
        check_storage(self.recipe.storage)
        tasks = checked_tasks(self.recipe)
        dropped = PhaseStore(directory.path).dropped if directory else {}
        active = [number for number, group in enumerate(self.recipe.groups) if group.name not in dropped]
        with ExitStack() as joined:
            computes_here = backend.cluster is None and not backend.is_for_trials
            # Before joining, because a local cluster counts its GPUs as it starts.
            joined.enter_context(gpu_policy(self.recipe.gpu_mode, computes_here))
            joined.enter_context(joined_for_devices(backend.cluster))
            groups = [self.recipe.groups[number] for number in active]
            _check_models(self.recipe, groups, backend, reporter)
            directory, lease, reporter = joined.enter_context(open_run(self, backend, reporter, directory))
            requests = least_requests(self.recipe, groups)
            joined.enter_context(waited_for_nodes(backend.cluster, self.recipe, requests, reporter))
            ending, stop_requested = threading.Event(), reporter.stop_requested
            caller, reporter = reporter, replace(reporter, stop_requested=lambda: ending.is_set() or stop_requested())
            if lease.has_local_changes:
                for phase in (directory.path / "groups").glob("*/*"):
                    CheckpointStore(phase, lease).rescue(reporter.emit)
            store = PhaseStore(directory.path, lease)
            is_recorded = directory.is_recorded()
            has_begun = is_recorded or backend.is_for_trials
            recipe = self.recipe if has_begun else with_max_workers(self.recipe, reporter)
            groups = [recipe.groups[number] for number in active]
            recipe = with_precisions(recipe, backend.cluster, reporter, groups=groups)
            groups = [recipe.groups[number] for number in active]
            report_gpus(recipe, groups, backend.cluster, reporter)
            if recipe != self.recipe:
                directory.decide(recipe)
            if not has_begun or _lacks_starts(recipe, groups, store):
                starts = score_starts(recipe, groups, backend, reporter)
                store.record_starts(starts.dev)
                report_warnings(starts.warnings, reporter)
            if not is_recorded:
                (directory.store / "pairs").delete_folder()
            pairs = load_pairs(recipe, directory.path, backend, reporter)
            if (fitted := fit_to_pairs(recipe, len(pairs), reporter)) != recipe:
                recipe = fitted
                groups = [recipe.groups[number] for number in active]
                directory.decide(recipe)
            directory.record(recipe.seed, data_fingerprints(recipe, groups, pairs, tasks))
            store.record_pairs(pairs.fingerprint)
            tokens = prepare_tokens(recipe, groups, pairs, backend, reporter)
            contexts = [
                GroupContext(recipe, number, directory.store, tables)
                for number, tables in zip(active, tokens, strict=True)
            ]
            best = []
            with track_run(recipe, directory.path, reporter.emit) as tracked:
                with open_groups(recipe, contexts, backend, tracked.relay(reporter)) as (opened, groups_reporter):
                    exchange = LabelExchange(recipe, store, ending, stop_requested)
                    interrupted = run_groups(recipe, opened, store, exchange, groups_reporter)
                final = FinalScores(None, stopped=interrupted)
                if not interrupted:
                    best = save_best(recipe, contexts, store)
                    final = final_scores(recipe, tasks, pairs, best, directory, backend, caller)
                tracked.end(final.stopped, final.evaluation)
            final.write(directory.store)
            directory.store_events()
            return MutualResult(
                recipe, directory, best, dict(store.dropped), len(pairs), final.stopped, final.evaluation
            )

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        return roles_on(self.recipe, {group.name: devices for group in self.recipe.groups}, devices)

    @property
    def trials(self) -> MutualTrials:
        return MutualTrials(self.recipe)


def _lacks_starts(recipe: MutualRecipe, groups: Sequence[GroupSection], store: PhaseStore) -> bool:
    """Return whether the selection of the best models, or the labels, need dev scores of starts that are not recorded."""
    needed = recipe.mutual.best_of == "start_and_cycles" or recipe.mutual.weigh_by == "group_and_dev"
    return needed and any(group.name not in store.starts for group in groups)


def _check_models(recipe: MutualRecipe, groups: Sequence[GroupSection], backend: Backend, reporter: Reporter) -> None:
    """Load each group's models once, before the pairs are mined: without one, the run ends.

    Raises:
        EncoderError: A model cannot be loaded.
    """
    memory = max(model_memory(group.backbone) for group in groups)
    call = DeviceCall("check of the groups' models", partial(_load_models, recipe, groups), memory)
    backend.run_on_devices([call], device_options(recipe, groups, {}, uses_gpu=False), reporter)


def _load_models(recipe: MutualRecipe, groups: Sequence[GroupSection], reporter: Reporter) -> None:
    for group in groups:
        load_models(recipe, group)
