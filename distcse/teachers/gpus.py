"""GPUs that teacher servers and embedding actors would get, for warnings before a run starts."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.placement.gpu_shortfall import GpuRole
from distcse.placement.resources import Node, ResourceRequest
from distcse.recipe import TeachersSection
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import GPU_KEY, embedding_actor_resources


def server_roles(section: TeachersSection, reads_tables_itself: bool = False) -> list[GpuRole]:
    """Describe the servers that can use a GPU: those of live teachers and of rank-space teachers.

    Args:
        section: The teachers.
        reads_tables_itself: Whether only live teachers have servers, as in a sweep whose trials read the tables.
            Default: False.

    Returns:
        One role, or none where no server computes.
    """
    computing = {"live"} if reads_tables_itself else {"live", "rank space"}
    served = [kind for kind in map(kind_of, section.encoders) if kind.serving(section.mode) in computing]
    if not any(kind.uses_gpu for kind in served):
        return []
    number, gpus = section.num_servers * len(served), section.gpus_per_actor
    description = f"{number} teacher server{'' if number == 1 else 's'}"
    return [
        GpuRole(
            name="the servers of live or rank-space teachers",
            demand=ResourceRequest(
                description, number, {"GPU": gpus or 0.0}, section.node_labels, "teachers.num_servers", GPU_KEY
            ),
            is_decided=gpus is not None,
            needs_full_gpu=False,
            rule="teachers.gpus_per_actor is null, which gives servers none",
        )
    ]


def embedding_roles(section: TeachersSection, nodes: Sequence[Node]) -> list[GpuRole]:
    """Describe the actors that embed the corpus; they run before anything else holds a GPU.

    Returns:
        One role, or none where no model of a teacher has a table.
    """
    if not any(kind.uses_gpu and kind.uses_table(section.mode) for kind in map(kind_of, section.encoders)):
        return []
    each = embedding_actor_resources(section, [node.resources for node in nodes if node.has(section.node_labels)])
    description = f"teachers.embedding_workers={section.embedding_workers or 1}"
    return [
        GpuRole(
            name="the actors that embed the corpus",
            demand=ResourceRequest(description, 1, each, section.node_labels, "teachers.embedding_workers", GPU_KEY),
            is_decided=section.gpus_per_actor is not None,
            needs_full_gpu=True,
            rule="each needs a node with 1 free GPU",
        )
    ]
