"""CPUs and GPUs of the teachers' processes: embedding actors and servers of similarity lists.

The kinds of teachers are imported in functions, because Ray Train's controller imports this module and needs no PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distcse.placement.gpu_plan import GpuPlan, plan_gpus
from distcse.placement.gpu_shares import GpuRole, count_gpus
from distcse.placement.resources import Node, ResourceRequest, Resources
from distcse.recipe import GpuMode, TeacherSection, TeachersSection

EMBEDDING, SERVERS = "embedding actors", "teacher servers"
"""Names of the GPU roles of teachers."""

_GPU_KEY = "teachers.gpus_per_actor"
_NAMES = {"live": "live teacher servers", "rank space": "rank-space servers"}
_ALTERNATIVES = {"live": "use teachers.mode=table", "rank space": ""}


def plan_embedding(
    section: TeachersSection, nodes: Sequence[Node], mode: GpuMode, teachers: Sequence[TeacherSection] | None = None
) -> GpuPlan:
    """Decide the GPUs of an embedding actor. Embedding actors run before anything else holds a GPU.

    Args:
        section: The recipe's teachers.
        nodes: The nodes of the cluster.
        mode: The recipe's `resources.gpu`.
        teachers: Those of the teachers that embed. Default: all.

    Returns:
        The plan; without a role if no embedding actor computes with a model.

    Raises:
        GpuRequiredError: `mode` is `required`, and embedding actors get no GPU.
    """
    from distcse.teachers.kinds import kind_of

    kinds = [kind_of(teacher) for teacher in (section.encoders if teachers is None else teachers)]
    if not any(kind.uses_gpu and kind.uses_table(section.mode) for kind in kinds):
        return plan_gpus([], nodes, mode)
    number = section.embedding_workers or max(1, int(count_gpus(nodes, section.node_labels)))
    key = "teachers.embedding_workers"
    counts = range(1, number)
    role = GpuRole(EMBEDDING, number, section.node_labels, section.gpus_per_actor, key, _GPU_KEY, counts=counts)
    return plan_gpus([role], nodes, mode)


def request_embedding_actors(section: TeachersSection, count: int, each: Resources) -> ResourceRequest:
    """Return the resource request of `count` embedding actors."""
    key = "teachers.embedding_workers"
    return ResourceRequest(f"{key}={count}", count, each, section.node_labels, key, {"GPU": _GPU_KEY})


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
    number = section.num_servers * sum(kind.uses_gpu for kind in served)
    if not number:
        return []
    key = "teachers.num_servers"
    return [GpuRole(SERVERS, number, section.node_labels, section.gpus_per_actor, key, _GPU_KEY, is_helper=True)]


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


def server_resources(section: TeachersSection, teacher: TeacherSection, gpus: float) -> dict[str, float]:
    """Return the CPUs (`num_cpus`) and GPUs (`num_gpus`) of one server of a teacher.

    Args:
        section: The recipe's teachers.
        teacher: One of them.
        gpus: GPUs of a server that computes with a model or ranks.
    """
    from distcse.teachers.kinds import kind_of

    kind = kind_of(teacher)
    serving = kind.serving(section.mode)
    computes = serving != "table" and kind.uses_gpu
    return {"num_cpus": 1.0 if serving == "live" else 0.0, "num_gpus": gpus if computes else 0.0}
