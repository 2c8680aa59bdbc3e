"""Checks of shared folders, run concurrently as by several nodes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from distcse.cluster.shared_storage import check_paths
from distcse.devices.resources import Node
from distcse.runs.directory import check_storage
from distcse.runs.distillation.processes import joined_for_embedding, joined_for_run
from tests.clusters import FixedCluster
from tests.jobs import make_recipe


def test_concurrent_checks_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Nodes write into the same folder, so each needs its own file name."""
    marker = tmp_path / ".marker"
    marker.write_text("token")
    barrier = Barrier(2)

    def check_repeatedly(node: str) -> list[str | None]:
        problems = []
        for _ in range(200):
            barrier.wait(timeout=10)
            problems.append(check_paths({"storage.runs": marker}, {}, "token", node))
        return problems

    with ThreadPoolExecutor() as nodes:
        results = nodes.map(check_repeatedly, ("one", "two"))
        assert all(problem is None for problems in results for problem in problems)
    assert list(tmp_path.iterdir()) == [marker]


def test_a_problem_names_the_path_and_its_key(tmp_path: Path) -> None:
    """A missing marker, a marker with other content, and a missing path."""
    marker = tmp_path / ".marker"
    problem = check_paths({"storage.runs": marker}, {}, "token", "one")
    assert problem is not None and f"does not see what is written to {tmp_path}, storage.runs" in problem
    marker.write_text("another token")
    problem = check_paths({"storage.runs": marker}, {}, "token", "one")
    assert problem is not None and f"reads another file than was written at {tmp_path}, storage.runs" in problem
    marker.write_text("token")
    missing = tmp_path / "corpus.txt"
    problem = check_paths({"storage.runs": marker}, {"corpus.file": missing}, "token", "one")
    assert problem is not None and f"has no {missing}, corpus.file" in problem


def test_embedding_checks_only_the_cache_on_the_teachers_nodes(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """The folder of runs may not exist yet, and nothing is embedded on students' nodes. A run checks both on all nodes."""
    overrides = ("training.node_labels={role: students}", "teachers.node_labels={role: teachers}", "training.workers=1")
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *overrides)
    cluster = FixedCluster([Node(role, {"CPU": 1.0}, {"role": role}) for role in ("students", "teachers")])
    runs, cache = tmp_path / "runs", tmp_path / "cache"
    check_storage(recipe.storage, ["cache"])
    with joined_for_embedding(recipe, cluster):
        assert not runs.exists()
    check_storage(recipe.storage)
    with joined_for_run(recipe, cluster, runs):
        pass
    teacher, students, teachers = "teachers.encoders.0.backbone", {"role": "students"}, {"role": "teachers"}
    assert cluster.required == [
        ({"storage.cache": cache}, {teacher}, [teachers]),
        ({"storage.runs": runs, "storage.cache": cache}, {teacher, "student.backbone"}, [students, teachers]),
    ]
