"""A family of students of several sizes in one space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from distcse.checks import Question, require
from distcse.devices.device import DeviceSpeed
from distcse.devices.gpu_plan import PlansOfTrials
from distcse.devices.resources import Node
from distcse.errors import EncoderSettingError, StoppedEarlyError
from distcse.evaluation import Evaluation
from distcse.events import Reporter
from distcse.model_source import shown_name
from distcse.models import Encoder, EncoderHandle
from distcse.models.static import require_model2vec
from distcse.models.student import depth_of, needs_first_layer
from distcse.preflight.precision import Role
from distcse.recipe import FamilyRecipe, StudentSection
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import gpu_policy, joined_for_devices, model_memory, waited_for_nodes
from distcse.runs.directory import RunDirectory, check_storage
from distcse.runs.distillation.experiment import Distillation, load_trained
from distcse.runs.distillation.extent import fit_to_corpus
from distcse.runs.distillation.final_evaluation import ScoredStudent, final_scores, labelled_tasks
from distcse.runs.distillation.preflight import recipe_questions
from distcse.runs.distillation.preparation import PreparedCorpus, data_fingerprints, read_fingerprints
from distcse.runs.distillation.processes import (
    least_requests,
    plan_run,
    report_embedding_gpus,
    roles_on,
    student_needs,
    with_precisions,
)
from distcse.runs.distillation.result import StudentResult, is_start
from distcse.runs.experiment import Experiment, Result, open_run, register_experiment
from distcse.runs.family.students import (
    MAX_ROWS,
    member_recipe,
    plan_side_by_side,
    prepare_targets,
    train_in_turn,
    train_side_by_side,
    train_static,
)
from distcse.runs.model_card import USE, ModelCard, hub_metadata, limits, usage
from distcse.runs.stoppable_evaluation import FinalScores
from distcse.storage import to_uri


@register_experiment(FamilyRecipe)
class Family(Experiment[FamilyRecipe]):
    """Training of students of several sizes on the same targets (see `Experiment`)."""

    name = "a family of students"

    def rehearse(self, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None) -> None:
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
        return {**super().unread_keys(), "student.layers": "each student of the family has its own layers"}

    def check_resources(self, nodes: Sequence[Node]) -> None:
        plan_run(self.recipe.student_recipe(self.recipe.largest_first[0]), nodes)

    def precision_roles(self, devices: Sequence[DeviceSpeed]) -> list[Role]:
        return roles_on(self.recipe, list(devices))

    def run(self, backend: Backend, reporter: Reporter, directory: RunDirectory | None = None) -> Result:
        """Run the recipe; see `Experiment.run`. A resumed run keeps trained students and continues an unfinished one."""
        require(self.questions(directory))
        check_storage(self.recipe.storage)
        labelled = labelled_tasks(self.recipe)
        with ExitStack() as joined:
            joined.enter_context(gpu_policy(self.recipe.gpu_mode, computes_here=backend.cluster is None))
            joined.enter_context(joined_for_devices(backend.cluster))
            recipe = with_member_layers(self.recipe, backend, reporter)  # before the folder is made
            directory, _, logged = joined.enter_context(open_run(self, backend, reporter, directory))
            recipe = with_precisions(recipe, backend.cluster, logged)
            largest, cluster = recipe.student_recipe(recipe.largest_first[0]), backend.cluster
            with waited_for_nodes(cluster, largest, least_requests(largest), logged):
                report_embedding_gpus(largest, cluster, logged)
                prepared = PreparedCorpus.prepare(largest, backend, logged)
                recipe = fit_to_corpus(recipe, prepared.corpus, Reporter())  # reported with the largest student
                if recipe != self.recipe:
                    directory.decide(recipe)
                directory.record(recipe.seed, data_fingerprints(recipe, prepared.corpus, labelled))
                is_projected = prepare_targets(prepared, directory, backend, logged)
            recipes = [member_recipe(recipe, member, directory, is_projected) for member in recipe.largest_first]
            if plan_side_by_side(recipe, backend.cluster, logged):
                results = train_side_by_side(recipe, recipes, directory, backend, logged)
            else:
                results = train_in_turn(recipes, backend, logged)
            students = {result.recipe.name: result for result in results}
            static: dict[str, Path] = {}
            final = FinalScores(None, len(students) < len(recipes) or any(each.interrupted for each in results))
            if not final.stopped:
                try:
                    for member in recipe.static_members:
                        logged.check_stop(f"before {member.label}")
                        reports = logged.of_group(member.label)
                        static[member.label] = train_static(
                            recipe, member, results[0], prepared.corpus, directory, backend, reports
                        )
                except StoppedEarlyError:
                    final = FinalScores(None, stopped=True)
            if not final.stopped:
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
            return family_result(recipe, directory, students, static, final.evaluation, final.stopped)


def _find_model2vec(recipe: FamilyRecipe) -> None:
    if recipe.static_members:
        require_model2vec("static: true")


def with_member_layers(recipe: FamilyRecipe, backend: Backend, reporter: Reporter) -> FamilyRecipe:
    """Return the recipe with each student's layers as indices. The backbone is loaded once, where models are evaluated."""
    if all(isinstance(member.layers, list) for member in recipe.largest_first):
        return recipe
    call = DeviceCall("backbone's layers", partial(_read_depth, recipe.student), model_memory(recipe.student.backbone))
    ((depth, with_first),) = backend.run_on_devices([call], student_needs(recipe).options(uses_gpu=False), reporter)
    family = []
    for number, member in enumerate(recipe.family):
        layers = member.layers
        if isinstance(layers, int):
            if layers > depth:
                raise EncoderSettingError(
                    f"family.{number}.layers is {layers}, but {recipe.student.backbone} has {depth} layers; "
                    f"write at most {depth}"
                )
            layers = evenly_spaced(depth, layers, with_first)
        family.append(member.model_copy(update={"layers": layers}))
    return recipe.model_copy(update={"family": family})


def evenly_spaced(depth: int, count: int, with_first: bool) -> list[int]:
    """Return the indices of `count` of `depth` layers, evenly spaced with the last one among them.

    `with_first` begins with layer 0, for models whose first layer has other parameters than the rest.
    """
    if with_first:
        return [round(index * (depth - 1) / max(1, count - 1)) for index in range(count)]
    return [(index + 1) * depth // count - 1 for index in range(count)]


def _read_depth(section: StudentSection, reporter: Reporter) -> tuple[int, bool]:
    whole = section.model_copy(update={"layers": None, "embedding_size": None})
    backbone = Encoder.from_section(whole).backbone
    return depth_of(backbone), needs_first_layer(backbone)


def family_result(
    recipe: FamilyRecipe,
    directory: RunDirectory,
    students: Mapping[str, StudentResult],
    static: Mapping[str, Path],
    evaluation: Evaluation | None,
    interrupted: bool,
) -> Result:
    """Describe a family's run."""
    models = {name: result.directory.model for name, result in students.items()} | dict(static)
    unchanged = [name for name, result in students.items() if result.unchanged]
    width = max(map(len, models), default=0)
    notes = dict.fromkeys(unchanged, "  (its start: no checkpoint is better)")
    in_space = [name for name, result in students.items() if not is_start(result.train_result)] + [*static]
    cards = [
        replace(
            card,
            title=f"{recipe.name} {name}",
            sections=[*card.sections, _siblings(name, in_space)],
            evaluated_as=name,
        )
        for name, result in students.items()
        for card in result.cards
    ]
    return Result(
        recipe,
        directory,
        interrupted,
        evaluation,
        models,
        unchanged,
        next((result.reference for result in students.values()), None),
        [f"model   {name:<{width}}  {to_uri(folder)}{notes.get(name, '')}" for name, folder in models.items()],
        [*cards, *(_static_card(recipe, students, name, folder, in_space) for name, folder in static.items())],
    )


def _static_card(
    recipe: FamilyRecipe, students: Mapping[str, StudentResult], name: str, folder: Path, in_space: Sequence[str]
) -> ModelCard:
    largest, result = next(iter(students.items()))
    rows = min(result.rows - recipe.evaluation.num_heldout, MAX_ROWS)
    backbone = recipe.student.backbone
    text = (
        f"A static sentence encoder: one vector per token of `{shown_name(backbone)}`, averaged over a text. It began with "
        f"the vectors that `{largest}` of the same run has for single tokens, and was trained by model2vec on the targets of "
        f"that student, with {rows:,} unlabelled sentences."
    )
    return ModelCard(
        model=folder,
        metadata=hub_metadata(backbone, "sentence-similarity", ["sentence-similarity", "static-embeddings"], rows),
        title=f"{recipe.name} {name}",
        sections=[text, usage(USE), _siblings(name, in_space)],
        closing=[
            limits("It does not see the order of words. The licences of corpus, backbone and teachers apply to it.")
        ],
        evaluated_as=name,
    )


def _siblings(name: str, in_space: Sequence[str]) -> str:
    """Return which other students' document embeddings a student can search."""
    others = " and ".join(f"`{other}`" for other in in_space if other != name)
    if not others or name not in in_space:
        return ""
    return (
        f"It is one of a family of students that learned the same targets: {others} of the same run lie in its space. "
        "Documents embedded by one of them can be searched with queries embedded by another."
    )
