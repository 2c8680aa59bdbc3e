"""The processes of a student's run, the paths that they need, and their CPUs, GPUs and precisions on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from distcse.devices.cluster import Cluster, ClusterSpeeds, Labels
from distcse.devices.device import DeviceSpeed
from distcse.devices.device_plan import DeviceOptions
from distcse.devices.gpu_plan import GpuPlan, Process, plan_gpus
from distcse.devices.resources import (
    Node,
    ResourceRequest,
    Resources,
    count_fitting,
    even_share,
    nodes_with,
    refuse_impossible,
)
from distcse.events import Reporter
from distcse.model_source import CONFIG_FILE
from distcse.models import resolve_model
from distcse.models.folder import find_local_model
from distcse.preflight.precision import Role
from distcse.recipe import Recipe, TeacherSection
from distcse.runs.cluster_fit import NodeNeeds, decide_for, evaluation_paths, usable_devices
from distcse.runs.experiment import TrialGpus
from distcse.storage import is_uri
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import (
    EMBEDDING,
    SERVERS,
    least_embedding,
    plan_embedding,
    server_processes,
    starts_servers,
)

R = TypeVar("R", bound=Recipe)


def list_teachers(recipe: Recipe) -> list[int]:
    """Return the indices of the teachers whose lists a step or `agreement` compares.

    A teacher that reads pairs only scores candidates, unless a term needs lists or no other teacher has vectors.
    """
    numbers = list(range(len(recipe.teachers.encoders)))
    with_vectors = [number for number in numbers if kind_of(recipe.teachers.encoders[number]).has_vectors]
    may_need_lists = recipe.objective.custom or recipe.objective.keys_that_need("lists", active=True)
    return with_vectors if recipe.compares_candidates and with_vectors and not may_need_lists else numbers


def with_list_teachers(recipe: R) -> R:
    """Return the recipe with only the teachers of `list_teachers`."""
    encoders = [recipe.teachers.encoders[number] for number in list_teachers(recipe)]
    return recipe.model_copy(update={"teachers": recipe.teachers.model_copy(update={"encoders": encoders})})


WORKERS = "training workers"
"""Name of a run's training workers."""


def student_processes(recipe: Recipe) -> list[Process]:
    """Return the processes of a student's training: workers and teachers' servers."""
    training = recipe.training
    key = "training.workers" if training.min_workers is None else "training.min_workers"
    workers = Process(
        WORKERS,
        training.workers,
        training.node_labels,
        training.gpus_per_worker,
        training.cpus_per_worker,
        f"{key}={training.workers}",
        key,
        {"CPU": "training.cpus_per_worker", "GPU": "training.gpus_per_worker"},
        is_elastic=training.min_workers is not None,
    )
    return [workers, *server_processes(with_list_teachers(recipe).teachers)]


def student_needs(recipe: Recipe) -> NodeNeeds:
    """Return which nodes can work for a student's run, and what they must see."""
    read = {"student.backbone": Path(recipe.student.backbone), **_teacher_paths(recipe)}
    read |= evaluation_paths(recipe.evaluation.data, recipe.evaluation.dev)
    if (other_run := recipe.objective.projection_of) is not None and not is_uri(other_run):
        read["objective.regression.projection"] = Path(other_run)
    labels = {"training.node_labels": recipe.training.node_labels, "teachers.node_labels": recipe.teachers.node_labels}
    return NodeNeeds(recipe, labels, read, recipe.teachers.heartbeat_timeout_s)


def _teacher_paths(recipe: Recipe) -> dict[str, Path]:
    return {f"teachers.encoders.{number}.backbone": Path(t.backbone) for number, t in _models(recipe).items()}


def joined_for_run(
    recipe: Recipe, cluster: Cluster | None, run: Path, in_sweep: bool = False
) -> AbstractContextManager[RunResources | None]:
    """Join a run's cluster, and check its room for the processes and that its nodes see the run's folders.

    Returns:
        The context manager of what the run's processes reserve; of None without a cluster or in a sweep.
    """
    return student_needs(recipe).joined(cluster, lambda nodes: None if in_sweep else plan_run(recipe, nodes), run)


def joined_for_embedding(recipe: Recipe, cluster: Cluster | None) -> AbstractContextManager[None]:
    """Join the cluster of an embedding pass, and check that the teachers' nodes see the cache.

    Embedding needs no run folder and no training workers.
    """
    labels = {"teachers.node_labels": recipe.teachers.node_labels}
    return NodeNeeds(recipe, labels, _teacher_paths(recipe)).joined(cluster, lambda nodes: None)


@dataclass(frozen=True)
class RunResources:
    """What the processes of a run's training reserve, decided once for the run."""

    gpus: GpuPlan
    per_worker: Resources
    """CPUs and GPUs of one training worker."""

    @property
    def server_gpus(self) -> float:
        """GPUs of one server that computes with a model or ranks."""
        return self.gpus.of(SERVERS)

    def requests(self, workers: int) -> list[ResourceRequest]:
        """List what must run at the same time, with the given number of workers."""
        training, *others = self.gpus.requests([self.per_worker["CPU"]])
        return [replace(training, number=workers, description=f"{training.number_key}={workers}"), *others]


def least_requests(recipe: Recipe) -> list[ResourceRequest]:
    """List what a run needs on any cluster, to wait for its nodes before anything is planned on them."""
    training, teachers, mode = recipe.training, recipe.teachers, recipe.gpu_mode
    requests = [process.least_request(mode) for process in student_processes(recipe)]
    requests = [request for request in requests if any(request.each.values())]
    if teachers.node_labels and teachers.node_labels != training.node_labels:
        requests.append(least_embedding(teachers, mode))
    return requests


def plan_run(recipe: Recipe, nodes: Sequence[Node]) -> RunResources:
    """Decide the CPUs and GPUs of everything that runs during training.

    Values that the recipe does not set are an even share of the CPUs, a GPU for a worker and a quarter for a helper.
    """
    training = recipe.training
    usable = nodes_with(nodes, training.node_labels, "training.node_labels")
    if starts_servers(with_list_teachers(recipe).teachers):
        nodes_with(nodes, recipe.teachers.node_labels, "teachers.node_labels")
    plan = plan_gpus(student_processes(recipe), nodes, recipe.gpu_mode)
    gpus = {"GPU": plan.of(WORKERS)} if plan.of(WORKERS) else {}
    cpus = _remaining_cpus(nodes, training.node_labels, plan.requests([1.0])[1:])
    most = [count_fitting([node], gpus) for node in usable]
    cpu = training.cpus_per_worker or max(1.0, float(int(even_share(cpus, min(training.workers, sum(most)), most))))
    resources = RunResources(plan, {"CPU": cpu, **gpus})
    refuse_impossible(resources.requests(min(training.worker_counts)), nodes)
    return resources


def _remaining_cpus(nodes: Sequence[Node], labels: Labels, requests: Sequence[ResourceRequest]) -> list[float]:
    """Return the CPUs of each node with the labels after the requests, each placed where most are free.

    Requests without labels count on these nodes: servers start where their workers run.
    """
    free = [node.resources.get("CPU", 0.0) for node in nodes]
    for request in requests:
        usable = [index for index, node in enumerate(nodes) if node.has(request.labels or labels)]
        for _ in range(request.number):
            free[max(usable, key=free.__getitem__)] -= request.each.get("CPU", 0.0)
    return [cpus for node, cpus in zip(nodes, free, strict=True) if node.has(labels)]


def describe_resources(recipe: Recipe, resources: RunResources | None, nodes: Sequence[Node]) -> str:
    """Describe the nodes of a run's cluster and the resources of its workers, unless they are a sweep's, in one line."""
    cpus, gpus = (sum(node.resources.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    cluster = f"nodes {len(nodes)}, CPUs {cpus:g}, GPUs {gpus:g}"
    if resources is None:
        return cluster
    per_worker = resources.per_worker
    each = f"CPUs {per_worker['CPU']:g}, GPUs {per_worker.get('GPU', 0):g}"
    return f"{cluster}; workers {recipe.training.workers}, each with {each}"


def plans_of_embedding(recipe: Recipe, nodes: Sequence[Node]) -> list[GpuPlan]:
    """Return the plan of an embedding pass without a run."""
    return [plan_embedding(recipe.teachers, nodes, recipe.gpu_mode)]


def plans_of_run(recipe: Recipe, nodes: Sequence[Node]) -> list[GpuPlan]:
    """Return the plans of a run's GPUs: that of the embedding pass, then that of the training."""
    return [*plans_of_embedding(recipe, nodes), plan_run(recipe, nodes).gpus]


def with_precisions(recipe: R, cluster: Cluster | None, reporter: Reporter, trial: TrialGpus | None = None) -> R:
    """Return the recipe with every `precision: auto` decided, and report the choice.

    A recipe that is fp32 throughout measures no device.
    """
    precisions = {recipe.training.precision, recipe.evaluation.precision}
    if precisions | {teacher.precision for teacher in _models(recipe).values()} == {"fp32"}:
        return recipe
    _fetch_families(recipe)
    on_cluster = partial(_roles_on_cluster, recipe, trial)
    return decide_for(recipe, cluster, reporter, lambda one: roles_on(recipe, [one]), on_cluster, trial is not None)


def with_teacher_precisions(recipe: Recipe, cluster: Cluster | None, reporter: Reporter) -> Recipe:
    """Decide `precision: auto` for the teachers alone, for an embedding pass, which needs no training workers."""
    models, gpus = _models(recipe), recipe.teachers.gpus_per_actor or 0.0
    if all(teacher.precision == "fp32" for teacher in models.values()):
        return recipe
    _fetch_families(recipe)
    return decide_for(
        recipe,
        cluster,
        reporter,
        lambda one: _teacher_roles(recipe, {number: [one] for number in models}),
        lambda speeds, nodes: _teacher_roles(recipe, _teacher_devices(recipe, speeds, nodes, gpus)),
    )


def roles_on(recipe: Recipe, devices: list[DeviceSpeed]) -> list[Role]:
    """List student, teachers and evaluation, each on the given devices."""
    return _roles(recipe, devices, dict.fromkeys(_models(recipe), devices), devices)


def _roles_on_cluster(
    recipe: Recipe, trial: TrialGpus | None, speeds: ClusterSpeeds, nodes: Sequence[Node]
) -> list[Role]:
    options = DeviceOptions(uses_gpu=recipe.gpu_mode != "none")
    if trial is None:
        options = student_needs(recipe).options()
        gpus = plan_run(recipe, nodes).gpus
        trial = TrialGpus(gpus.of(WORKERS), gpus.of(SERVERS))
    student = speeds.of(recipe.training.node_labels, trial.worker)
    teachers = _teacher_devices(recipe, speeds, nodes, trial.server)
    return _roles(recipe, student, teachers, [*student, *usable_devices(options, speeds, nodes)])


def _teacher_devices(
    recipe: Recipe, speeds: ClusterSpeeds, nodes: Sequence[Node], server_gpus: float
) -> dict[int, list[DeviceSpeed]]:
    """Return the devices of each teacher's embedding actors, of its live servers, or of its scores of candidates."""
    section = recipe.teachers
    if any(teacher.precision == "auto" for teacher in _models(recipe).values()):  # others need no device
        nodes_with(nodes, section.node_labels, "teachers.node_labels")
    embedding_gpus, served = plan_embedding(section, nodes, recipe.gpu_mode).of(EMBEDDING), list_teachers(recipe)

    def devices(number: int, teacher: TeacherSection) -> list[DeviceSpeed]:
        if number not in served:
            return usable_devices(student_needs(recipe).options(), speeds, nodes)
        return speeds.of(
            section.node_labels, embedding_gpus if kind_of(teacher).uses_table(section.mode) else server_gpus
        )

    return {number: devices(number, teacher) for number, teacher in _models(recipe).items()}


def _roles(
    recipe: Recipe, student: list[DeviceSpeed], teachers: dict[int, list[DeviceSpeed]], evaluation: list[DeviceSpeed]
) -> list[Role]:
    return [
        Role("student", "training.precision", recipe.training.precision, student),
        *_teacher_roles(recipe, teachers),
        Role("evaluation", "evaluation.precision", recipe.evaluation.precision, evaluation),
    ]


def _teacher_roles(recipe: Recipe, devices: dict[int, list[DeviceSpeed]]) -> list[Role]:
    return [
        Role(
            f"teacher {number}",
            f"teachers.encoders.{number}.precision",
            teacher.precision,
            devices[number],
            is_teacher=True,
            overflows_fp16=kind_of(teacher, only_local=True).overflows_fp16,
        )
        for number, teacher in _models(recipe).items()
    ]


def _fetch_families(recipe: Recipe) -> None:
    """Download the config.json of hub teachers that are not in the hub's cache, since T5 and Gemma overflow in fp16.

    Without it, the first run would choose another precision, and therefore another table, than later ones.
    """
    for teacher in _models(recipe).values():
        if teacher.precision == "auto" and find_local_model(teacher.backbone, wanted=[CONFIG_FILE]) is None:
            resolve_model(teacher.backbone, wanted=[CONFIG_FILE])


def _models(recipe: Recipe) -> dict[int, TeacherSection]:
    """Return the teachers that have a precision, by number: endpoints and custom classes have none."""
    return {
        number: teacher
        for number, teacher in enumerate(recipe.teachers.encoders)
        if kind_of(teacher, only_local=True).is_model
    }
