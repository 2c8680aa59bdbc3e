"""GPUs that teacher servers and embedding actors would get, for warnings before a run starts."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.ray_backend.gpu_shortfall import GpuRole
from distcse.ray_backend.nodes import Node, ResourceRequest
from distcse.recipe import TeachersSection
from distcse.teachers.embedding_actors import embedding_actor_resources
from distcse.teachers.factory import uses_table

_GPU_KEY = {"GPU": "teachers.gpus_per_actor"}


def server_roles(section: TeachersSection, reads_tables_itself: bool = False) -> list[GpuRole]:
    """Describe the servers that can use a GPU: those of live teachers and of rank-space teachers.

    Args:
        section: The teachers.
        reads_tables_itself: Whether only live teachers have servers, as in a sweep whose trials read the tables.
            Default: False.

    Returns:
        One role, or none where no server computes.
    """
    live = [teacher for teacher in section.encoders if not uses_table(section, teacher)]
    ranking = [teacher for teacher in section.encoders if teacher not in live and teacher.similarity == "rank"]
    served = live if reads_tables_itself else [*live, *ranking]
    if all(teacher.endpoint is not None for teacher in served):  # an endpoint computes elsewhere
        return []
    number, gpus = section.num_servers * len(served), section.gpus_per_actor
    description = f"{number} teacher server{'' if number == 1 else 's'}"
    return [
        GpuRole(
            name="the servers of live or rank-space teachers",
            demand=ResourceRequest(
                description, number, {"GPU": gpus or 0.0}, section.node_labels, "teachers.num_servers", _GPU_KEY
            ),
            is_decided=gpus is not None,
            needs_full_gpu=False,
            rule="teachers.gpus_per_actor is null, which gives servers none",
        )
    ]


def builder_roles(section: TeachersSection, nodes: Sequence[Node]) -> list[GpuRole]:
    """Describe the actors that embed the corpus; they run before anything else holds a GPU.

    Returns:
        One role, or none where no model of a teacher has a table.
    """
    if not any(teacher.endpoint is None and uses_table(section, teacher) for teacher in section.encoders):
        return []
    each = embedding_actor_resources(section, [node.resources for node in nodes if node.has(section.node_labels)])
    description = f"teachers.embedding_workers={section.embedding_workers or 1}"
    return [
        GpuRole(
            name="the actors that embed the corpus",
            demand=ResourceRequest(description, 1, each, section.node_labels, "teachers.embedding_workers", _GPU_KEY),
            is_decided=section.gpus_per_actor is not None,
            needs_full_gpu=True,
            rule="each needs a node with 1 free GPU",
        )
    ]
