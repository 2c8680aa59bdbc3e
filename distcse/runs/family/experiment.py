"""A family of students of several sizes in one space: they train on the same targets, side by side on GPUs or in turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.checks import Question, require
from distcse.devices.cluster import Cluster
from distcse.devices.device import DeviceSpeed, default_device
from distcse.devices.device_plan import GIB, DeviceOptions, OwnNode, plan_devices
from distcse.devices.gpu_plan import PlansOfTrials
from distcse.devices.resources import Node
from distcse.errors import DistcseError, EncoderSettingError, StoppedEarlyError
from distcse.evaluation import Contamination
from distcse.events import Event, GroupEvent, LogMessage, Reporter, StageProgress
from distcse.models import Encoder, EncoderHandle, StaticEncoder
from distcse.models.static import LEARNING_RATE, require_model2vec
from distcse.models.student import depth_of, evenly_spaced, needs_first_layer
from distcse.preflight.precision import Role
from distcse.recipe import FamilyRecipe, MemberSection, Recipe, StudentSection, with_values
from distcse.runs.backend import Backend, DeviceCall, LocalBackend
from distcse.runs.cluster_fit import (
    NodeNeeds,
    gpu_policy,
    joined_for_devices,
    model_memory,
    report_gpus,
    waited_for_nodes,
)
from distcse.runs.directory import PROJECTION, RunDirectory, check_storage
from distcse.runs.distillation.corpus import fit_to_corpus
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.runs.distillation.experiment import Distillation, OpenDistillation, load_trained
from distcse.runs.distillation.final_evaluation import ScoredStudent, final_scores, labelled_tasks
from distcse.runs.distillation.preflight import recipe_questions
from distcse.runs.distillation.preparation import (
    PreparedCorpus,
    data_fingerprints,
    locate_targets,
    read_fingerprints,
    require_shared_projection,
)
from distcse.runs.distillation.processes import (
    joined_for_run,
    least_requests,
    plan_run,
    plans_of_embedding,
    roles_on,
    student_needs,
    with_precisions,
)
from distcse.runs.experiment import Experiment, open_run, register_experiment
from distcse.runs.final_evaluation import FinalScores
from distcse.runs.result import MAX_STATIC_ROWS, Result, StudentResult, family_result
from distcse.storage import ArtifactStore, to_uri
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.targets import TargetSpec
from distcse.text import Corpus
from distcse.training.checkpoints import CheckpointStore
from distcse.training.trainer import TrainResult, finished_state

_TRAINING_MEMORY = 2 * GIB
"""Memory of a process that trains a student, in addition to that of one that encodes with it."""
_BLOCK = 1 << 14
"""Rows whose joined vectors are in memory together."""
_BYTES_PER_TEXT = 500
_CHECKED_ROWS = 512
"""Rows whose cosines choose the best pass, where the recipe holds none out."""


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

    @property
    def needs(self) -> NodeNeeds:
        return student_needs(self.recipe)

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
                report_gpus(cluster, largest.gpu_mode, partial(plans_of_embedding, largest), logged)
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


def _read_depth(section: StudentSection, reporter: Reporter) -> tuple[int, bool]:
    whole = section.model_copy(update={"layers": None})
    backbone = Encoder.from_section(whole).backbone
    return depth_of(backbone), needs_first_layer(backbone)


def prepare_targets(prepared: PreparedCorpus, directory: RunDirectory, backend: Backend, reporter: Reporter) -> bool:
    """Complete the teachers' tables, and fit in the family's folder the projection that puts all students into one space.

    It is rotated toward the vectors of the largest student before training, or copied from the run that the recipe names.

    Returns:
        Whether there is a projection. There is none if the targets are the vectors of one teacher of the students' width.
    """
    require_shared_projection(prepared.recipe, prepared.corpus, directory)
    with (
        joined_for_run(prepared.recipe, backend.cluster, directory.path),
        backend.metered(reporter, directory.path.name) as metered,
    ):
        tables = prepared.tables(backend, metered)
        targets = prepared.spec(directory, tables, backend, metered).targets
    return targets is not None and targets.projection is not None


def member_recipe(recipe: FamilyRecipe, member: MemberSection, directory: RunDirectory, is_projected: bool) -> Recipe:
    """Return the recipe of a student's run, which is in the folder `members` of the family's."""
    changes = {
        "storage.runs": to_uri(directory.path / "members"),
        "storage.run_id": member.label,
        "evaluation.final_suites": [],
    }
    if is_projected:
        changes["objective.regression.projection"] = to_uri(directory.path)
    return with_values(recipe.student_recipe(member), changes)


def train_in_turn(recipes: Sequence[Recipe], backend: Backend, reporter: Reporter) -> list[StudentResult]:
    """Train students one after the other, each with all workers of its recipe, or continue what a stop has interrupted.

    Returns:
        Their results, in their order. After a stop request, the last one may be interrupted, and later students have none.
    """
    results: list[StudentResult] = []
    for recipe in recipes:
        reports = reporter.of_group(recipe.name)
        begun, student = _reopened(recipe)
        try:
            results.append(student.run(backend, reports, begun))
        except StoppedEarlyError:  # before its first step: it has no model
            break
        if results[-1].interrupted:
            break
    return results


def plan_side_by_side(recipe: FamilyRecipe, cluster: Cluster | None, reporter: Reporter) -> bool:
    """Return whether students train side by side on the GPUs of a joined cluster, and say so."""
    students, teachers = len(recipe.largest_first), recipe.teachers
    has_tables = all(kind_of(teacher).uses_table(teachers.mode) for teacher in teachers.encoders)
    if cluster is None or students == 1 or not (recipe.is_for_one_process and has_tables) or cluster.is_one_cpu():
        return False
    plan = plan_devices(_options(recipe, cluster), cluster.nodes(), OwnNode("", 0.0), students, _memory(recipe))
    gpus = 0.0 if plan is None else plan.each.get("GPU", 0.0)
    if plan is None or not gpus or plan.number == 1:
        return False
    at_once = "" if plan.number == students else f", {plan.number} at the same time"
    if plan.waiting:
        waits = "1 waits" if plan.waiting == 1 else f"{plan.waiting} wait"
        at_once = f"; {waits} for nodes, or for another's end"
    share = "a GPU" if gpus == 1 else f"{gpus:g} of a GPU"
    reporter.emit(LogMessage(f"{students} students train side by side, each with {share}{at_once}"))
    return True


def train_side_by_side(
    recipe: FamilyRecipe, recipes: Sequence[Recipe], directory: RunDirectory, backend: Backend, reporter: Reporter
) -> list[StudentResult]:
    """Train students at the same time, each on a GPU or its part of one, or continue what a stop or a loss has interrupted.

    Their runs are open in this process, which holds their leases, logs their events and exports them. Only the steps are taken
    by other processes, one for each student.

    Returns:
        Results of the students that took a step, in their order. After a stop request, they may be interrupted.
    """
    with ExitStack() as scope:
        runs: dict[str, OpenDistillation] = {}
        for each in recipes:
            begun, student = _reopened(each)
            runs[each.name] = scope.enter_context(student.opened(backend, reporter.of_group(each.name), begun))

        def report(event: Event) -> None:
            if isinstance(event, GroupEvent):
                runs[event.group].reporter.emit(event.event)
            else:
                reporter.emit(event)

        calls: list[DeviceCall[TrainResult | None]] = [
            DeviceCall(
                "training of a student",
                partial(_train, name, run.spec, run.tables),
                _memory(recipe),
                returns_on_stop=True,
            )
            for name, run in runs.items()
        ]
        options = _options(recipe, backend.cluster, directory.path)
        try:
            trained = backend.run_on_devices(calls, options, Reporter(report, reporter.stop_requested))
        except DistcseError as error:
            if error.is_own_failure:  # of a student, which a resumed family repeats: others must not wait for it
                _end_finished(list(runs.values()))
            raise
        results = []
        for run, trained_student in zip(runs.values(), trained, strict=True):
            if trained_student is not None:
                with suppress(StoppedEarlyError):  # before its first step: it has no model
                    results.append(run.end(trained_student))
    return results


def _end_finished(runs: Sequence[OpenDistillation]) -> None:
    """Export the students whose training has finished."""
    for run in runs:
        state = finished_state(CheckpointStore(run.spec.run))
        if state is not None:
            run.end(TrainResult(state, state.step, 0.0, 0.0))


def _train(name: str, spec: TrainSpec, tables: Sequence[EmbeddingTable | None], reporter: Reporter) -> TrainResult:
    """Train a student in this process, from its latest checkpoint if there is one."""
    return LocalBackend().train(spec, Corpus.open(spec.corpus), tables, reporter.of_group(name))


def _memory(recipe: FamilyRecipe) -> float:
    """Estimate the bytes of a process that trains a student."""
    return model_memory(recipe.student.backbone) + _TRAINING_MEMORY


def _options(recipe: FamilyRecipe, cluster: Cluster | None, run: Path | None = None) -> DeviceOptions:
    """Return the options of the processes that train: unlike evaluation, they do not run on nodes for teachers alone."""
    labels = {"training.node_labels": recipe.training.node_labels}
    can_wait = recipe.resources.wait_s > 0 and cluster is not None and cluster.can_grow()
    options = student_needs(recipe).options(run)
    return replace(options, labels=labels, gpus=recipe.gpus_of_a_student, can_wait=can_wait, trains=True)


def _reopened(recipe: Recipe) -> tuple[RunDirectory | None, Distillation]:
    """Return a student's run and its experiment; no run if it has not begun."""
    begun, student = RunDirectory.reopen_by_id(recipe)
    assert isinstance(student, Recipe)
    return begun, Distillation(student)


def train_static(
    recipe: FamilyRecipe,
    member: MemberSection,
    largest: StudentResult,
    corpus: Corpus,
    directory: RunDirectory,
    backend: Backend,
    reporter: Reporter,
) -> Path:
    """Train a static student on one of the backend's devices; one that is there already is kept.

    Returns:
        The folder of the trained model.
    """
    stored = directory.store / "members" / member.label / "model"
    if not stored.has_folder():
        spec, width = _targets(largest.recipe, corpus, largest.directory)
        rows = min(len(corpus), MAX_STATIC_ROWS)
        call = DeviceCall(
            f"training of {member.label}",
            partial(
                _train_static,
                largest.recipe,
                member.lr or LEARNING_RATE,
                largest.directory.store / "model",
                spec,
                corpus.store,
                stored,
            ),
            model_memory(str(largest.directory.model)) + rows * (2 * 4 * width + _BYTES_PER_TEXT),
        )
        backend.run_on_devices([call], student_needs(recipe).options(directory.path), reporter)
    stored.fetch_folder()
    return stored.path


def _targets(recipe: Recipe, corpus: Corpus, run: RunDirectory) -> tuple[TargetSpec, int]:
    """Locate the targets of a student that has been trained. Returns also the width of a teacher's vectors."""
    spec = locate_targets(recipe, corpus)
    if run.store.fetch(PROJECTION):
        spec = replace(spec, projection=run.store / PROJECTION)
    return spec, max(table.dimension for table in spec.tables)


def _train_static(
    recipe: Recipe,
    lr: float,
    largest: ArtifactStore,
    spec: TargetSpec,
    prepared: ArtifactStore,
    out: ArtifactStore,
    reporter: Reporter,
) -> None:
    require_model2vec("static: true")
    largest.fetch_folder()
    corpus, targets, device = Corpus.open(prepared), spec.open(), default_device()
    train, held_out = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
    rows = _evenly_spaced(train.ids(), MAX_STATIC_ROWS)
    checked = held_out if len(held_out) else rows[:_CHECKED_ROWS]
    progress = partial(reporter.advance, "static", total=None, unit="tokens")
    encoder = Encoder.load(largest.path, trust_remote_code=recipe.student.trust_remote_code)
    start = StaticEncoder.of_tokens(encoder.to(device).eval(), progress)
    vectors = []
    for begin in range(0, len(rows), _BLOCK):
        reporter.advance("static", begin, len(rows), "sentences")
        vectors.append(targets.vectors(rows[begin : begin + _BLOCK]))
    trained = start.train(
        corpus.texts(rows),
        np.concatenate(vectors),
        (corpus.texts(checked), targets.vectors(checked)),
        lr=lr,
        batch_size=recipe.training.batch_size,
        seed=recipe.seed,
        device=device,
        on_step=partial(reporter.check_stop, "in the training of a static student"),
    )
    trained.save(out)
    Contamination.read(largest.path).write(out)
    reporter.emit(
        StageProgress("static", len(rows), len(rows), "sentences", finished=True, note="trained by model2vec")
    )


def _evenly_spaced(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return `count` of the rows, or all if there are fewer."""
    return rows if len(rows) <= count else rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
