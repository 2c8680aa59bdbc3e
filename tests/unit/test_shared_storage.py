"""What one node sees of another's folders: looked at by several nodes at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from distcse.training.shared_storage import look


def test_nodes_that_look_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    """They write into the same folder; with one name for all, the file of one was removed by the other."""
    mark = tmp_path / ".mark"
    mark.write_text("token")
    together = Barrier(2)

    def looks(node: str) -> list[str | None]:
        seen = []
        for _ in range(200):
            together.wait(timeout=10)
            seen.append(look({"storage.runs": mark}, {}, "token", node))
        return seen

    with ThreadPoolExecutor() as nodes:
        told = nodes.map(looks, ("one", "two"))
        assert all(problem is None for each in told for problem in each)
    assert list(tmp_path.iterdir()) == [mark]


def test_what_a_node_sees_otherwise_is_told_with_the_knob(tmp_path: Path) -> None:
    """Another file, none, and a place to read that is not there."""
    mark = tmp_path / ".mark"
    assert "does not see what is written" in (look({"storage.runs": mark}, {}, "token", "one") or "")
    mark.write_text("another token")
    assert "storage.runs; mend that file system" in (look({"storage.runs": mark}, {}, "token", "one") or "")
    mark.write_text("token")
    missing = tmp_path / "corpus.txt"
    told = look({"storage.runs": mark}, {"corpus.file": missing}, "token", "one")
    assert (
        told == f"has no {missing}, corpus.file; put it on storage that all nodes share, or at the same place on each"
    )
