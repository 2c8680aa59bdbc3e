"""A family of students of several sizes in one space."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from distcse.checks import Question, require
from distcse.device import DeviceSpeed
from distcse.errors import StoppedEarlyError
from distcse.events import Reporter
from distcse.experiments.backend import Backend
from distcse.experiments.distillation.experiment import Distillation, load_trained
from distcse.experiments.distillation.extent import fit_to_corpus
from distcse.experiments.distillation.final_evaluation import ScoredStudent, final_scores, labelled_tasks
from distcse.experiments.distillation.fingerprints import data_fingerprints, read_fingerprints
from distcse.experiments.distillation.preflight import recipe_questions
from distcse.experiments.distillation.preparation import PreparedCorpus
from distcse.experiments.distillation.resources import least_requests, plan_run, report_embedding_gpus
from distcse.experiments.distillation.roles import roles_on, with_precisions
from distcse.experiments.experiment import Experiment, register_experiment
from distcse.experiments.family.layers import with_member_layers
from distcse.experiments.family.result import FamilyResult
from distcse.experiments.family.static import train_static
from distcse.experiments.family.students import (
    member_recipe,
    plan_side_by_side,
    prepare_targets,
    train_in_turn,
    train_side_by_side,
)
from distcse.experiments.gpu_policy import gpu_policy
from distcse.experiments.run_scope import joined_for_devices, open_run, waited_for_nodes
from distcse.models import EncoderHandle
from distcse.models.static import require_model2vec
from distcse.placement.gpu_plan import PlansOfTrials
from distcse.placement.resources import Node
from distcse.precision import Role
from distcse.recipe import FamilyRecipe
from distcse.runs.directory import RunDirectory, check_storage


@register_experiment(FamilyRecipe)
class Family(Experiment[FamilyRecipe]):
    """Training of students of several sizes on the same targets (see `Experiment`)."""

    name = "a family of students"

    def check(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
        require(self.questions())
        recipe = with_member_layers(self.recipe, backend, reporter)
        for member in recipe.largest_first:
            student = Distillation(recipe.student_recipe(member))
            student.check(backend, reporter.of_group(member.label), plans_of_trials)
        with joined_for_devices(backend.cluster):
            plan_side_by_side(recipe, backend.cluster, reporter)

    def questions(self, begun: RunDirectory | None = None) -> list[Question]:
        static: list[Question] = [("static members", partial(_find_model2vec, self.recipe))]
        return [*static, *recipe_questions(self.recipe)]

    def fingerprints(self, reporter: Reporter) -> dict[str, str]:
        return read_fingerprints(self.recipe, reporter)

    def unread_keys(self) -> dict[str, str]:
        layers = dict.fromkeys(
            ("student.layers", "student.num_layers"), "each student of the family has its own layers"
        )
        return {**super().unread_keys(), **layers}

    def check_resources(self, nodes: Sequence[Node]) -> None:
        plan_run(self.recipe.student_recipe(self.recipe.largest_first[0]), nodes)

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        return roles_on(self.recipe, list(devices))

    def run(self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None) -> FamilyResult:
        """Run the recipe; see `Experiment.run`. A resumed run keeps trained students and continues an unfinished one."""
        require(self.questions(directory))
        check_storage(self.recipe.storage)
        labelled = labelled_tasks(self.recipe)
        with ExitStack() as joined:
            computes_here = backend.cluster is None and not backend.is_for_trials
            joined.enter_context(gpu_policy(self.recipe.gpu_mode, computes_here))
            joined.enter_context(joined_for_devices(backend.cluster))
            recipe = with_member_layers(self.recipe, backend, reporter)  # before the folder is made
            directory, lease, logged = joined.enter_context(open_run(self, backend, reporter, directory))
            recipe = with_precisions(recipe, backend.cluster, logged)
            largest, cluster = recipe.student_recipe(recipe.largest_first[0]), backend.cluster
            with waited_for_nodes(cluster, largest, least_requests(largest), logged):
                report_embedding_gpus(largest, cluster, logged)
                prepared = PreparedCorpus.prepare(largest, backend, logged)
                recipe = fit_to_corpus(recipe, prepared.corpus, Reporter())  # reported with the largest student
                if recipe != self.recipe:
                    directory.decide(recipe)
                directory.record(recipe.seed, data_fingerprints(recipe, prepared.corpus, labelled))
                is_projected = prepare_targets(prepared, directory, lease, backend, logged)
            recipes = [member_recipe(recipe, member, directory, is_projected) for member in recipe.largest_first]
            if plan_side_by_side(recipe, backend.cluster, logged):
                results = train_side_by_side(recipe, recipes, directory, backend, logged)
            else:
                results = train_in_turn(recipes, backend, logged)
            students = {result.recipe.name: result for result in results}
            if len(students) < len(recipes) or any(student.interrupted for student in results):
                directory.store_events()
                return FamilyResult(recipe, directory, students, {}, None, interrupted=True)
            static: dict[str, Path] = {}
            try:
                for member in recipe.static_members:
                    logged.check_stop(f"before {member.label}")
                    reports = logged.of_group(member.label)
                    static[member.label] = train_static(
                        recipe, member, results[0], prepared.corpus, directory, backend, reports
                    )
            except StoppedEarlyError:
                directory.store_events()
                return FamilyResult(recipe, directory, students, static, None, interrupted=True)
            scored = [
                ScoredStudent(
                    name,
                    str(student.directory.model),
                    EncoderHandle(partial(load_trained, student.recipe, student.directory.store)),
                    trained=student.directory.model,
                )
                for name, student in students.items()
            ]
            scored += [ScoredStudent(name, str(folder), None, trained=folder) for name, folder in static.items()]
            final = final_scores(recipe, prepared.corpus, labelled, scored, directory, backend, logged)
            final.write(directory.store)
            directory.store_events()
            return FamilyResult(recipe, directory, students, static, final.evaluation, final.stopped)


def _find_model2vec(recipe: FamilyRecipe) -> None:
    if recipe.static_members:
        require_model2vec("static: true")
