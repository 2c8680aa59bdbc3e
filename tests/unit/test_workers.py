"""What workers decide together."""

from __future__ import annotations

from distcse.devices.distributed import on_all_ranks, rank
from distcse.errors import CorpusError, TeacherError
from tests.failures import fails_with
from tests.workers import run_workers


def test_the_mistake_of_one_worker_is_raised_by_all() -> None:
    """Raised by one alone, the others would wait for it in their next collective."""
    assert run_workers(_met, 2) == ["rank 1 has no disk", "rank 1 has no disk"]


def _met() -> str:
    assert on_all_ranks(lambda: rank() + 5) == rank() + 5
    try:
        on_all_ranks(_work)
    except CorpusError as mistake:
        return str(mistake)
    return "no error"


def _work() -> int:
    if rank() == 1:
        raise CorpusError("rank 1 has no disk")
    return 1


def test_a_worker_alone_has_its_own() -> None:
    assert on_all_ranks(lambda: 3) == 3
    with fails_with(TeacherError, "mine"):
        on_all_ranks(_mine)


def _mine() -> None:
    raise TeacherError("mine")
