"""Corpora that change: each teacher embeds new sentences alone, once. Vectors of the others are copied, bit by bit."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from distcse.errors import EmbeddingTableError
from distcse.events import Event, Reporter, StageProgress
from distcse.recipe import Recipe, with_values
from distcse.runs.backend import EmbeddingRequest, LocalBackend
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.preflight import check_embedding
from distcse.runs.distillation.tables import prepare_tables
from distcse.teachers import table as table_module
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable
from tests.failures import fails_with
from tests.jobs import make_recipe, rows_embedded


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    """A recipe with one teacher."""
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences)


class Pass:
    """An embedding pass over some lines: its tables, and how many rows each teacher embedded."""

    def __init__(
        self, recipe: Recipe, lines: Sequence[str], backend: LocalBackend | None = None, verifies: bool = True
    ) -> None:
        Path(str(recipe.corpus.path)).write_text("\n".join(lines) + "\n")
        events: list[Event] = []
        self.corpus = read_corpus(recipe, Reporter())
        reporter = Reporter(events.append)
        tables = prepare_tables(recipe, self.corpus, backend or LocalBackend(), reporter, verifies=verifies)
        self.tables = [table for table in tables if table is not None]
        self.embedded, self.events = rows_embedded(events), events

    def stored(self) -> np.ndarray:
        """The first teacher's vectors as they are stored."""
        return self.tables[0].stored_vectors(np.arange(len(self.corpus)))


def with_other_cache(recipe: Recipe, folder: Path) -> Recipe:
    return with_values(recipe, {"storage.cache": str(folder)})


def assert_rounded_alike(one: np.ndarray, other: np.ndarray) -> None:
    """Batches of other shapes can change the last bit."""
    np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("change", ["grown", "edited", "shuffled"])
def test_a_changed_corpus_embeds_its_new_sentences_alone(
    recipe: Recipe, sentences: list[str], tmp_path: Path, change: str
) -> None:
    lines = sentences[:300]
    lines, changed, new = {
        "grown": (lines, [*lines, *sentences[300:310]], 10),
        "edited": (lines, ["a new first sentence", *lines[1:200], *lines[210:], "and a last one"], 2),
        "shuffled": (lines, lines[::-1], 0),
    }[change]
    before = Pass(recipe, lines)
    assert before.embedded == [300]
    after = Pass(recipe, changed)
    assert after.embedded == [new]
    anew = Pass(with_other_cache(recipe, tmp_path / "other"), changed)
    assert anew.embedded == [len(changed)]
    old = [row for row, line in enumerate(changed) if line in lines]
    assert_rounded_alike(after.stored(), anew.stored())
    expected = before.stored()[[lines.index(changed[row]) for row in old]]
    np.testing.assert_array_equal(after.stored()[old], expected)
    assert not list(after.tables[0].directory.glob("reuse*"))


def test_a_teacher_that_was_added_embeds_itself_alone(
    recipe: Recipe, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    assert Pass(recipe, sentences[:200]).embedded == [200]
    two = make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences)
    assert Pass(two, sentences[:200]).embedded == [0, 200]
    assert Pass(two, sentences[:210]).embedded == [10, 10]


def test_other_sizes_of_shards_embed_nothing(recipe: Recipe, sentences: list[str]) -> None:
    before = Pass(recipe, sentences[:250])
    after = Pass(with_values(recipe, {"teachers.shard_rows": 64}), sentences[:250])
    assert after.embedded == [0] and after.tables[0].directory != before.tables[0].directory
    np.testing.assert_array_equal(after.stored(), before.stored())


def test_a_corpus_that_outgrows_its_shards_keeps_its_vectors(
    recipe: Recipe, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "SHARD_ROWS", 64)
    monkeypatch.setattr(table_module, "MOST_SHARDS", 3)
    chosen = with_values(recipe, {"teachers.shard_rows": "auto"})
    before, after = Pass(chosen, sentences[:192]), Pass(chosen, sentences[:200])
    assert [each.tables[0].identity.shard_rows for each in (before, after)] == [64, 128]
    assert [*before.embedded, *after.embedded] == [192, 8]
    np.testing.assert_array_equal(after.stored()[:192], before.stored())


def test_duplicates_are_embedded_once_and_stored_once(recipe: Recipe, sentences: list[str], tmp_path: Path) -> None:
    lines = [*sentences[:150], *sentences[50:150], sentences[0], *sentences[150:180]]
    doubled = Pass(recipe, lines)
    assert doubled.embedded == [180] and len(doubled.corpus) == 281
    anew = Pass(with_other_cache(recipe, tmp_path / "other"), sentences[:180])
    first = np.array([lines.index(line) for line in lines])
    np.testing.assert_array_equal(doubled.stored(), doubled.stored()[first])
    assert_rounded_alike(doubled.stored(), anew.stored()[[sentences.index(line) for line in lines]])
    assert sum(len(np.load(file)) for file in doubled.tables[0].directory.glob("*.npy")) == 180
    without = Pass(with_values(recipe, {"corpus.deduplicate": "exact"}), lines)
    assert without.embedded == [0] and len(without.corpus) == 180
    np.testing.assert_array_equal(without.stored(), doubled.stored()[np.unique(first)])
    assert Pass(recipe, [*lines, *lines[-3:], "another one"]).embedded == [1]


def test_the_table_with_most_sentences_is_used(recipe: Recipe, sentences: list[str]) -> None:
    few, many = Pass(recipe, sentences[:60]), Pass(recipe, sentences[40:300])
    assert (few.embedded, many.embedded) == ([60], [240])
    assert Pass(recipe, sentences[30:310]).embedded == [20]


def test_damaged_and_missing_shards_of_the_earlier_table_are_embedded_again(
    recipe: Recipe, sentences: list[str]
) -> None:
    before = Pass(recipe, sentences[:300])
    folder = before.tables[0].directory
    (folder / "shard-00000.json").unlink()
    damaged = bytearray((folder / "shard-00001.npy").read_bytes())
    damaged[-1] ^= 1
    (folder / "shard-00001.npy").write_bytes(damaged)
    after = Pass(recipe, sentences[:310])
    assert after.embedded == [210]
    expected = before.tables[0].stored_vectors(np.arange(200, 300))
    np.testing.assert_array_equal(after.tables[0].stored_vectors(np.arange(200, 300)), expected)


class StoppingBackend(LocalBackend):
    """Ends in the middle of a pass."""

    def embed(self, request: EmbeddingRequest) -> None:
        super().embed(EmbeddingRequest(**{**vars(request), "missing": request.missing[:2]}))
        raise InterruptedError


def test_an_interrupted_pass_keeps_complete_shards_and_reuses_for_the_others(
    recipe: Recipe, sentences: list[str]
) -> None:
    lines = [line for number, line in enumerate(sentences[:330]) if number % 10]
    Pass(recipe, lines)
    with pytest.raises(InterruptedError):
        Pass(recipe, sentences[:330], StoppingBackend())
    assert Pass(recipe, sentences[:330]).embedded == [13]


def test_a_pass_without_new_sentences_loads_no_model(
    recipe: Recipe, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Pass(recipe, sentences[:200])
    kind = type(kind_of(recipe.teachers.encoders[0]))
    monkeypatch.setattr(kind, "open_embedder", lambda self: pytest.fail("loaded a model"))
    assert Pass(recipe, sentences[50:150]).embedded == [0]


def flip_last_byte(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", [Path.unlink, flip_last_byte])
@pytest.mark.parametrize("file", ["first.npy", "numbers.npy", "distinct_rows.json"])
def test_numbers_of_an_earlier_corpus_that_are_lost_are_made_again(
    file: str, damage: Callable[[Path], None], recipe: Recipe, sentences: list[str]
) -> None:
    lines = [*sentences[:100], *sentences[50:100]]
    before = Pass(recipe, lines)
    expected = before.stored()
    damage(Path(recipe.storage.cache) / "distinct_rows" / before.corpus.fingerprint / file)
    after = Pass(recipe, [*lines, *sentences[100:110]])
    assert after.embedded == [10]
    np.testing.assert_array_equal(after.stored()[:150], expected)


def test_rows_are_embedded_where_the_earlier_table_is_removed_during_the_pass(
    recipe: Recipe, sentences: list[str]
) -> None:
    before = Pass(recipe, sentences[:200])

    class Removing(LocalBackend):
        def embed(self, request: EmbeddingRequest) -> None:
            if request.reuse is not None:
                for file in before.tables[0].directory.glob("*.npy"):
                    file.unlink()
            super().embed(request)

    after = Pass(recipe, sentences[:210], Removing())
    assert after.tables[0].missing_shards() == [] and after.embedded == [210]
    assert all(event.done <= event.total for event in after.events if isinstance(event, StageProgress) and event.total)


def test_a_damaged_new_table_is_not_taken_for_a_lost_earlier_one(recipe: Recipe, sentences: list[str]) -> None:
    Pass(recipe, sentences[:200])

    class Damaged(LocalBackend):
        def embed(self, request: EmbeddingRequest) -> None:
            raise EmbeddingTableError("of the new table")

    with fails_with(EmbeddingTableError, "of the new table"):
        Pass(recipe, sentences[:210], Damaged())


def test_a_dry_run_counts_the_new_sentences(recipe: Recipe, sentences: list[str]) -> None:
    Pass(recipe, sentences[:200])
    Path(str(recipe.corpus.path)).write_text("\n".join(sentences[:210]) + "\n")
    notes: list[str] = []
    check_embedding(recipe, LocalBackend(), Reporter(lambda event: notes.append(str(getattr(event, "note", "")))))
    assert sum("10 of 210 rows to embed" in note for note in notes) == 1


def test_tables_of_a_sweep_are_hashed_once(
    recipe: Recipe, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials check sizes alone: the sweep has hashed the shards before."""
    Pass(recipe, sentences[:200])

    monkeypatch.setattr(table_module, "load_checked_label", lambda *paths: pytest.fail("hashed a shard"))
    after = Pass(recipe, sentences[:200], verifies=False)
    assert after.embedded == [0]
    table = after.tables[0]
    for damage in (lambda file: file.write_bytes(file.read_bytes()[:-9]), Path.unlink):
        damage(table.directory / "shard-00001.npy")
        assert table.missing_shards(verify=False) == [1]


def test_a_table_keeps_a_bounded_number_of_shards_open(
    recipe: Recipe, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Pass(with_values(recipe, {"teachers.shard_rows": 5}), sentences[:100]).tables[0]
    expected = table.stored_vectors(np.arange(100))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (16 * table_module.OPEN_SHARE, -1))
    table = EmbeddingTable(table.directory, table.identity)
    np.testing.assert_array_equal(table.stored_vectors(np.arange(100)), expected)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "shard-" in line}
    assert 0 < sum(str(table.directory) in path for path in mapped) <= 16
