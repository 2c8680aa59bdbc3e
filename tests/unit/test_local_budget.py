"""`storage.local_budget`: which tables are copied, and rows that are read where they are stored, ahead of the step."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distcse.errors import EmbeddingTableError, InvalidValueError
from distcse.events import LogMessage, Reporter
from distcse.recipe import Recipe, read_recipe
from distcse.recipe.section import settings_without_effect, unread_keys
from distcse.recipe.storage import parse_bytes
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.batch_loader import BatchLoader, with_worker_tables
from distcse.runs.distillation.distillation_task import train_student
from distcse.runs.distillation.tables import prepare_tables
from distcse.storage import artifact_store
from distcse.teachers import row_reader
from distcse.teachers.table import OPEN_SHARE, EmbeddingTable, TableIdentity, apply_local_budget
from distcse.teachers.targets import TargetReader, Targets
from tests.failures import fails_with
from tests.jobs import make_spec
from tests.unit.test_regression import ALONE
from tests.unit.test_worker_vectors import assert_close, clients_of, lists_of


def make_table(folder: Path, model: str = "m", rows: int = 25) -> EmbeddingTable:
    table = EmbeddingTable.locate(folder, TableIdentity(model, "c", rows, "mean", 8, "", "fp32", shard_rows=10))
    vectors = np.random.default_rng(0).normal(size=(rows, 6)).astype(np.float32)
    for shard in range(table.identity.shards):
        numbers = table.shard_range(shard)
        table.write_shard(shard, vectors[numbers.start : numbers.stop])
    return table


def in_place(table: EmbeddingTable) -> EmbeddingTable:
    """Open a table again, and read it where it is stored."""
    opened = EmbeddingTable(table.directory, table.identity)
    opened.reads_in_place = True
    return opened.location.open()


class Reads:
    """Counts a process's reads at offsets, and lets each wait until another one is in flight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, together: int = 1) -> None:
        self.sizes: list[int] = []
        barrier = threading.Barrier(together)
        read = artifact_store.read_at

        def counted(file: FileIO, offset: int, count: int) -> bytes:
            barrier.wait(timeout=120)
            self.sizes.append(count)
            return read(file, offset, count)

        monkeypatch.setattr(artifact_store, "read_at", counted)


def test_rows_that_are_read_in_place_equal_mapped_ones(tmp_path: Path) -> None:
    table = make_table(tmp_path)
    rows = [24, 0, 9, 10, 0, 19, 11]
    assert np.array_equal(in_place(table).stored_vectors(rows), table.stored_vectors(rows))
    assert np.array_equal(in_place(table).vectors(rows), table.vectors(rows))
    assert in_place(table).dimension == 6 and in_place(table).stored_bytes == 25 * 6 * 2


@pytest.mark.parametrize(
    ("most", "rows", "sizes"),
    [
        (row_reader.READ_BYTES, [3, 4, 5, 4, 8, 9, 10, 11, 24], [12, 24, 24, 36]),  # 8 and 9 end a shard
        (4 * 12 + 11, range(2, 25), [12, 24, *5 * [48]]),  # of eight, ten and five rows, each split
    ],
)
def test_adjacent_rows_are_one_read_up_to_a_size(
    most: int, rows: Sequence[int], sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reader, "READ_BYTES", most)
    table = make_table(tmp_path)
    placed = in_place(table)
    assert placed.dimension == 6  # reads the record
    reads = Reads(monkeypatch)
    assert np.array_equal(placed.vectors(rows), table.vectors(rows))
    assert sorted(reads.sizes) == sizes


def test_rows_are_read_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read waits until eight are in flight."""
    table = in_place(make_table(tmp_path, rows=200))
    assert table.dimension == 6
    reads = Reads(monkeypatch, together=8)
    assert len(table.vectors(np.arange(0, 160, 10))) == 16
    assert len(reads.sizes) == 16


def test_a_read_goes_on_until_it_has_all_and_a_missing_or_short_shard_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, whole = make_table(tmp_path), os.pread
    monkeypatch.setattr(os, "pread", lambda number, count, offset: whole(number, min(count, 7), offset))
    assert np.array_equal(in_place(table).vectors(np.arange(25)), table.vectors(np.arange(25)))
    with open(table.directory / "shard-00001.npy", "r+b") as file:
        file.truncate(60)
    (table.directory / "shard-00002.npy").unlink()
    for row, words in ((12, ("shard 1", "too short")), (24, ("shard 2", "No such file"))):
        with fails_with(EmbeddingTableError, *words):
            in_place(table).vectors([row])
    (table.directory / "shard-00000.json").unlink()
    with fails_with(EmbeddingTableError, "shard 0"):
        in_place(table).vectors([1])


def test_shards_that_are_open_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (16 * OPEN_SHARE, -1))
    table = in_place(make_table(tmp_path, rows=200))
    expected = make_table(tmp_path, rows=200).vectors(np.arange(200))
    assert np.array_equal(table.vectors(np.arange(200)), expected)
    opened = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert sum(str(table.directory) in file for file in opened) == 16


@pytest.mark.parametrize(("budget", "copied"), [(None, [0, 1, 2]), (1000, [0, 2]), (300, [0]), (299, []), (0, [])])
def test_tables_take_the_budget_in_the_recipes_order(tmp_path: Path, budget: int | None, copied: list[int]) -> None:
    tables = [make_table(tmp_path, "a"), make_table(tmp_path, "b", 80), make_table(tmp_path, "c", 50)]
    assert [table.stored_bytes for table in tables] == [300, 960, 600]
    events: list[Any] = []
    apply_local_budget([tables[0], None, *tables[1:]], budget, Reporter(events.append))
    assert [number for number, table in enumerate(tables) if not table.reads_in_place] == copied
    lines = [event.text for event in events if isinstance(event, LogMessage)]
    assert len(lines) == (budget is not None)
    for number, table in enumerate(tables if lines else []):
        way = "is memory-mapped" if number in copied else "is read row by row where it is stored"
        assert f"teacher {number + (number > 0)} ({table.stored_bytes / 2**30:.3g} GiB) {way}" in lines[0]


def test_lists_of_tables_that_do_not_fit_equal_those_of_mapped_ones(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with("training.batch_size=12", "teachers.prefetch_steps=4")
    spec, tables = make_spec(recipe)
    expected = lists_of(with_worker_tables(spec, tables), tables)
    small = recipe.model_copy(update={"storage": recipe.storage.model_copy(update={"local_budget": "1KiB"})})
    corpus = BatchLoader(spec, 0, 1).corpus
    found = [table for table in prepare_tables(small, corpus, LocalBackend(), Reporter()) if table is not None]
    assert len(found) == 2 and all(table.reads_in_place for table in found)
    by_workers = with_worker_tables(spec, found)
    assert all(location.reads_in_place for location in by_workers.worker_tables.values())
    assert_close([lists_of(by_workers, found)], [expected], tolerance=0)


def test_targets_are_read_ahead_of_the_step(tmp_path: Path) -> None:
    table = in_place(make_table(tmp_path))
    asked: list[int] = []

    def rows_of(step: int) -> np.ndarray:
        asked.append(step)
        return np.array([step, step + 1])

    reader = TargetReader(Targets([table], [1.0], None), rows_of, num_steps=10, steps_ahead=3)
    for step in range(10):
        assert np.array_equal(reader.vectors(step), table.vectors([step, step + 1]))
        assert asked == list(range(min(step + 4, 10)))
    assert np.array_equal(reader.vectors(2), table.vectors([2, 3]))


def test_a_closed_reader_of_targets_reads_no_further_step(tmp_path: Path) -> None:
    """The first step is read, the second is being read when the reader is closed, and the others are not begun."""
    began, released, read = threading.Event(), threading.Event(), list[int]()
    threads: set[threading.Thread] = set()

    class Waiting(Targets):
        def vectors(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
            threads.add(threading.current_thread())
            read.append(int(rows[0]))
            if read == [0, 1]:
                began.set()
                released.wait(timeout=120)
            return super().vectors(rows)

    reader = TargetReader(Waiting([make_table(tmp_path)], [1.0], None), lambda step: np.array([step]), num_steps=10)
    reader.vectors(0)
    began.wait(timeout=120)
    reader.close()
    released.set()
    (thread,) = threads
    thread.join()
    assert read == [0, 1]


def test_a_training_that_fails_closes_its_reader_of_targets(
    recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_with(*ALONE, "objective.regression={teachers: [1]}", "evaluation.dev=none")
    spec, tables = make_spec(recipe)
    readers: list[TargetReader] = []
    vectors = TargetReader.vectors

    def fails_at_the_second(reader: TargetReader, step: int) -> NDArray[np.float32]:
        readers.append(reader)
        if step == 1:
            raise EmbeddingTableError("shard 1 cannot be read")
        return vectors(reader, step)

    monkeypatch.setattr(TargetReader, "vectors", fails_at_the_second)
    with fails_with(EmbeddingTableError, "shard 1"):
        train_student(spec, clients_of(spec, tables), Reporter())
    with pytest.raises(RuntimeError, match="shutdown"):
        vectors(readers[0], 10)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0B", 0), ("200GiB", 200 * 2**30), ("1.5 TB", 1_500_000_000_000), ("3KiB", 3072)],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["200", "GiB", "-1GiB", "many"])
def test_a_size_without_a_unit_is_an_error(recipe_with: Callable[..., Recipe], text: str) -> None:
    with fails_with(InvalidValueError, "storage.local_budget", "200GiB"):
        recipe_with(f"storage.local_budget={text}")


def test_a_budget_without_tables_is_a_setting_without_effect(recipe_with: Callable[..., Recipe]) -> None:
    live = recipe_with("storage.local_budget=1GiB", "teachers.mode=live")
    warning = "storage.local_budget is set and has no effect: teachers.mode is live"
    assert warning in settings_without_effect(live, unread_keys(live))
    mutual = read_recipe("trans-encoder-mutual-base", ["storage.local_budget=1GiB", "evaluation.data=data"])
    assert any("storage.local_budget" in line for line in settings_without_effect(mutual, unread_keys(mutual)))
