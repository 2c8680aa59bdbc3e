"""CPUs and GPUs of the teachers' processes: embedding actors and servers of similarity lists."""

from __future__ import annotations

from collections.abc import Sequence

from distcse.placement.resources import ResourceRequest, Resources
from distcse.recipe import TeacherSection, TeachersSection

GPU_KEY = {"GPU": "teachers.gpus_per_actor"}
"""The key that sets the GPUs of a teacher's process, for messages about its resource request."""


def embedding_actor_resources(section: TeachersSection, nodes: Sequence[Resources]) -> dict[str, float]:
    """Return an embedding actor's resources: 1 CPU, and `gpus_per_actor` GPUs; if that is null, 1 GPU if a node has one."""
    has_gpu = any(node.get("GPU", 0.0) >= 1 for node in nodes)
    return {"CPU": 1.0, "GPU": float(has_gpu) if section.gpus_per_actor is None else section.gpus_per_actor}


def request_embedding_actors(section: TeachersSection, count: int, each: Resources) -> ResourceRequest:
    """Return the resource request of `count` embedding actors."""
    key = "teachers.embedding_workers"
    return ResourceRequest(f"{key}={count}", count, each, section.node_labels, key, GPU_KEY)


def server_demands(section: TeachersSection) -> list[ResourceRequest]:
    """Return the resource requests of live teachers' servers and of rank-space servers on GPUs.

    Servers of cosines from a table reserve no resources.
    """
    from distcse.teachers.kinds import kind_of

    servings = [kind_of(teacher).serving(section.mode) for teacher in section.encoders]
    live = [teacher for teacher, serving in zip(section.encoders, servings, strict=True) if serving == "live"]
    ranking = [teacher for teacher, serving in zip(section.encoders, servings, strict=True) if serving == "rank space"]
    requests = []
    for teachers, kind, alternative in (
        (live, "live teacher servers", "use teachers.mode=table"),
        (ranking if section.gpus_per_actor else [], "rank-space servers", ""),
    ):
        if teachers:
            number, resources = section.num_servers * len(teachers), server_resources(section, teachers[0])
            each = {"CPU": resources["num_cpus"], "GPU": resources["num_gpus"]}
            requests.append(
                ResourceRequest(
                    f"{number} {kind}",
                    number,
                    each,
                    section.node_labels,
                    "teachers.num_servers",
                    GPU_KEY,
                    alternative,
                )
            )
    return requests


def server_resources(section: TeachersSection, teacher: TeacherSection) -> dict[str, float]:
    """Return the CPUs (`num_cpus`) and GPUs (`num_gpus`) of one server of a teacher."""
    from distcse.teachers.kinds import kind_of  # imported here, because servers of tables do not import PyTorch

    serving, gpus = kind_of(teacher).serving(section.mode), section.gpus_per_actor or 0.0
    return {"num_cpus": 1.0 if serving == "live" else 0.0, "num_gpus": 0.0 if serving == "table" else gpus}
