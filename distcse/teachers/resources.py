"""CPUs and GPUs of the teachers' processes: embedding actors and servers of similarity lists.

The kinds of teachers are imported in functions, because Ray Train's controller imports this module and needs no PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distcse.placement.gpu_plan import GpuPlan, GpuRole
from distcse.placement.resources import Node, ResourceRequest, Resources, count_fitting
from distcse.recipe import GpuMode, TeacherSection, TeachersSection
from distcse.recipe.training import least_gpus

if TYPE_CHECKING:
    from distcse.teachers.kinds import TeacherKind

EMBEDDING, SERVERS = "embedding actors", "teacher servers"
"""Names of the GPU roles of teachers."""

_GPU_KEY = "teachers.gpus_per_actor"
_NAMES = {"live": "live teacher servers", "rank space": "rank-space servers"}
_ALTERNATIVES = {"live": "use teachers.mode=table", "rank space": ""}


def plan_embedding(
    section: TeachersSection,
    nodes: Sequence[Node],
    mode: GpuMode,
    teachers: Sequence[TeacherSection] | None = None,
    most: int | None = None,
) -> GpuPlan:
    """Decide the GPUs of an embedding actor. Embedding actors run before anything else holds a GPU.

    A required GPU that is missing is not refused, because a run whose tables are complete starts no embedding actor: call
    `GpuPlan.require_all` where one starts.

    Args:
        section: The recipe's teachers.
        nodes: The nodes of the cluster.
        mode: The recipe's `resources.gpu`.
        teachers: Those of the teachers that embed. Default: all.
        most: Actors that have work. Default: any number.

    Returns:
        The plan; without a role if no embedding actor computes with a model.
    """
    from distcse.teachers.kinds import kind_of

    kinds = [kind_of(teacher) for teacher in (section.encoders if teachers is None else teachers)]
    if not any(kind.uses_gpu and kind.uses_table(section.mode) for kind in kinds):
        return GpuPlan([], nodes, mode)
    usable = [node.resources for node in nodes if node.has(section.node_labels)]
    gpus, is_elastic = section.gpus_per_actor or 1.0, section.embedding_workers is not None
    number = section.embedding_workers or max(1, count_fitting(usable, {"GPU": gpus}))
    number = number if most is None else min(number, most)
    return GpuPlan(
        [GpuRole(EMBEDDING, number, section.node_labels, section.gpus_per_actor, False, is_elastic)], nodes, mode
    )


def request_embedding_actors(section: TeachersSection, count: int, each: Resources) -> ResourceRequest:
    """Return the resource request of `count` embedding actors."""
    key = "teachers.embedding_workers"
    return ResourceRequest(f"{key}={count}", count, each, section.node_labels, key, {"GPU": _GPU_KEY})


def least_embedding(section: TeachersSection, mode: GpuMode) -> ResourceRequest:
    """Return the request of the embedding actors that the recipe sets, or of one, on any cluster."""
    each = {"CPU": 1.0, "GPU": least_gpus(mode, section.gpus_per_actor)}
    return request_embedding_actors(section, section.embedding_workers or 1, each)


def server_roles(section: TeachersSection, reads_tables_itself: bool = False) -> list[GpuRole]:
    """Describe the servers that can use a GPU: those of live teachers and of rank-space teachers.

    Args:
        section: The teachers.
        reads_tables_itself: Whether only live teachers have servers, as in a sweep whose trials read the tables.
            Default: False.

    Returns:
        One role, or none where no server computes.
    """
    from distcse.teachers.kinds import kind_of

    computing = {"live"} if reads_tables_itself else {"live", "rank space"}
    served = [kind for kind in map(kind_of, section.encoders) if kind.serving(section.mode) in computing]
    number = section.num_servers * sum(_computes(kind, section.mode) for kind in served)
    if not number:
        return []
    return [GpuRole(SERVERS, number, section.node_labels, section.gpus_per_actor, is_helper=True)]


def server_demands(section: TeachersSection, gpus: float) -> list[ResourceRequest]:
    """Return the resource requests of the servers that reserve resources.

    Servers of cosines from a table reserve none; those of a rank space only GPUs.

    Args:
        section: The teachers.
        gpus: GPUs of a server that computes with a model or ranks.
    """
    from distcse.teachers.kinds import kind_of

    numbers = Counter(
        (kind_of(teacher).serving(section.mode), tuple(server_resources(section, teacher, gpus).values()))
        for teacher in section.encoders
    )
    requests = []
    for (serving, (num_cpus, num_gpus)), teachers in numbers.items():
        if num_cpus or num_gpus:
            number, key = section.num_servers * teachers, "teachers.num_servers"
            each = {"CPU": num_cpus, "GPU": num_gpus}
            description, keys = f"{number} {_NAMES[serving]}", {"GPU": _GPU_KEY}
            requests.append(
                ResourceRequest(description, number, each, section.node_labels, key, keys, _ALTERNATIVES[serving])
            )
    return requests


def starts_servers(section: TeachersSection) -> bool:
    """Return whether a run starts teacher servers: not where the workers read the tables of all teachers.

    Args:
        section: The teachers.
    """
    from distcse.teachers.kinds import kind_of

    servings = {kind_of(teacher).serving(section.mode) for teacher in section.encoders}
    return bool(servings - {"table"}) or (bool(servings) and section.serve == "actor")


def server_resources(section: TeachersSection, teacher: TeacherSection, gpus: float) -> dict[str, float]:
    """Return the CPUs (`num_cpus`) and GPUs (`num_gpus`) of one server of a teacher.

    Args:
        section: The recipe's teachers.
        teacher: One of them.
        gpus: GPUs of a server that computes with a model or ranks.
    """
    from distcse.teachers.kinds import kind_of

    kind = kind_of(teacher)
    num_cpus = 1.0 if kind.serving(section.mode) == "live" else 0.0
    return {"num_cpus": num_cpus, "num_gpus": gpus if _computes(kind, section.mode) else 0.0}


def _computes(kind: TeacherKind, mode: str) -> bool:
    """Whether a teacher's servers compute on a GPU: its model in live teachers, the ranks of any teacher in a rank space."""
    serving = kind.serving(mode)
    return serving == "rank space" or (serving == "live" and kind.uses_gpu)
