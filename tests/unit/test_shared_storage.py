"""What one node sees of another's folders: looked at by several nodes at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier

import pytest

from distcse.experiments.distillation.backends import make_backend
from distcse.ray_backend.shared_storage import check_paths
from distcse.runs.directory import check_storage
from tests.jobs import make_recipe


def test_nodes_that_look_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    """They write into the same folder; with one name for all, the file of one was removed by the other."""
    mark = tmp_path / ".mark"
    mark.write_text("token")
    together = Barrier(2)

    def looks(node: str) -> list[str | None]:
        seen = []
        for _ in range(200):
            together.wait(timeout=10)
            seen.append(check_paths({"storage.runs": mark}, {}, "token", node))
        return seen

    with ThreadPoolExecutor() as nodes:
        told = nodes.map(looks, ("one", "two"))
        assert all(problem is None for each in told for problem in each)
    assert list(tmp_path.iterdir()) == [mark]


def test_what_a_node_sees_otherwise_is_told_with_the_knob(tmp_path: Path) -> None:
    """Another file, none, and a place to read that is not there."""
    mark = tmp_path / ".mark"
    assert "does not see what is written" in (check_paths({"storage.runs": mark}, {}, "token", "one") or "")
    mark.write_text("another token")
    assert "storage.runs; mend that file system" in (check_paths({"storage.runs": mark}, {}, "token", "one") or "")
    mark.write_text("token")
    missing = tmp_path / "corpus.txt"
    told = check_paths({"storage.runs": mark}, {"corpus.file": missing}, "token", "one")
    assert (
        told == f"has no {missing}, corpus.file; put it on storage that all nodes share, or at the same place on each"
    )


def test_embedding_asks_nodes_for_teachers_for_the_cache_alone(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no folder of runs yet, and where students train nothing is embedded. A run asks all of its nodes for both."""
    asked: list[tuple[dict[str, Path], set[str], list[dict[str, str] | None]]] = []

    def ask(written: dict[str, Path], read: dict[str, Path], labels: list[dict[str, str] | None]) -> None:
        assert all(folder.is_dir() for folder in written.values())
        asked.append((written, set(read), labels))

    monkeypatch.setattr("distcse.ray_backend.cluster.start_ray", lambda: None)
    monkeypatch.setattr("distcse.ray_backend.cluster.cluster", nullcontext)
    monkeypatch.setattr("distcse.ray_backend.shared_storage.require_shared", ask)
    monkeypatch.setattr("distcse.experiments.distillation.ray_train.resources_per_worker", lambda recipe: {"CPU": 1.0})
    nodes = ("training.node_labels={role: students}", "teachers.node_labels={role: teachers}", "training.workers=1")
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *nodes)
    runs, cache = tmp_path / "runs", tmp_path / "cache"
    check_storage(recipe.storage, ["cache"])
    with make_backend(recipe)[1]:
        assert not runs.exists()
    check_storage(recipe.storage)
    with make_backend(recipe, runs)[1]:
        pass
    teacher, students, teachers = "teachers.encoders.0.backbone", {"role": "students"}, {"role": "teachers"}
    assert asked == [
        ({"storage.cache": cache}, {teacher}, [teachers]),
        ({"storage.runs": runs, "storage.cache": cache}, {teacher, "student.backbone"}, [students, teachers]),
    ]
