"""CPUs and GPUs of the teachers' processes: embedding actors and servers of similarity lists.

The kinds of teachers are imported in functions, because Ray Train's controller imports this module and needs no PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from distcse.devices.gpu_plan import GpuMode, GpuPlan, Process
from distcse.devices.resources import Node, ResourceRequest, count_fitting
from distcse.recipe import TeacherSection, TeachersSection

if TYPE_CHECKING:
    from distcse.teachers.kinds import TeacherKind

EMBEDDING, SERVERS = "embedding actors", "teacher servers"
"""Names of the teachers' processes."""

_GPU_KEY = "teachers.gpus_per_actor"
_NAMES = {"live": "live teacher servers", "rank": "rank-space servers"}
_ALTERNATIVES = {"live": "use teachers.mode=table", "rank": ""}


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

    Returns:
        The plan; without a process if no embedding actor computes with a model.
    """
    from distcse.teachers.kinds import kind_of

    kinds = [kind_of(teacher) for teacher in (section.encoders if teachers is None else teachers)]
    if not any(kind.uses_gpu and kind.uses_table(section.mode) for kind in kinds):
        return GpuPlan([], nodes, mode)
    usable = [node.resources for node in nodes if node.has(section.node_labels)]
    gpus, is_elastic = section.gpus_per_actor or 1.0, section.embedding_workers is not None
    number = section.embedding_workers or max(1, count_fitting(usable, {"GPU": gpus}))
    number = number if most is None else min(number, most)
    return GpuPlan([replace(embedding_actors(section, number), is_elastic=is_elastic)], nodes, mode)


def embedding_actors(section: TeachersSection, number: int) -> Process:
    """Return a number of embedding actors."""
    key = "teachers.embedding_workers"
    labels, gpus = section.node_labels, section.gpus_per_actor
    return Process(EMBEDDING, number, labels, gpus, 1.0, f"{key}={number}", key, {"GPU": _GPU_KEY})


def least_embedding(section: TeachersSection, mode: GpuMode) -> ResourceRequest:
    """Return the request of the embedding actors that the recipe sets, or of one, on any cluster."""
    return embedding_actors(section, section.embedding_workers or 1).least_request(mode)


def server_processes(section: TeachersSection, reads_tables: bool = False) -> list[Process]:
    """Return the servers that reserve CPUs or GPUs: those of live teachers and of rank-space teachers.

    Servers of cosines from a table reserve none; those of a rank space only GPUs.
    """
    from distcse.teachers.kinds import kind_of

    kinds = map(kind_of, section.encoders)
    numbers = Counter((kind.list_source(section.mode), _computes(kind, section.mode)) for kind in kinds)
    processes = []
    for (source, computes), teachers in numbers.items():
        if source == "live" or (source == "rank" and not reads_tables):
            number = section.num_servers * teachers
            processes.append(
                Process(
                    SERVERS,
                    number,
                    section.node_labels,
                    section.gpus_per_actor,
                    1.0 if source == "live" else 0.0,
                    f"{number} {_NAMES[source]}",
                    "teachers.num_servers",
                    {"GPU": _GPU_KEY},
                    _ALTERNATIVES[source],
                    computes,
                    is_helper=True,
                )
            )
    return processes


def starts_servers(section: TeachersSection) -> bool:
    """Return whether a run starts teacher servers: not where the workers read the tables of all teachers."""
    from distcse.teachers.kinds import kind_of

    sources = {kind_of(teacher).list_source(section.mode) for teacher in section.encoders}
    return bool(sources - {"table"}) or (bool(sources) and section.serve == "actor")


def server_resources(section: TeachersSection, teacher: TeacherSection, gpus: float) -> dict[str, float]:
    """Return the CPUs (`num_cpus`) and GPUs (`num_gpus`) of one server of a teacher."""
    from distcse.teachers.kinds import kind_of

    kind = kind_of(teacher)
    num_cpus = 1.0 if kind.list_source(section.mode) == "live" else 0.0
    return {"num_cpus": num_cpus, "num_gpus": gpus if _computes(kind, section.mode) else 0.0}


def _computes(kind: TeacherKind, mode: str) -> bool:
    """Whether a teacher's servers compute on a GPU: its model in live teachers, the ranks of any teacher in a rank space."""
    source = kind.list_source(mode)
    return source == "rank" or (source == "live" and kind.uses_gpu)
