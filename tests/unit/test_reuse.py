"""Corpora that change: each teacher embeds new sentences alone, once. Vectors of the others are copied, bit by bit."""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from distcse.errors import ReusedTableError
from distcse.events import Event, Reporter, StageProgress
from distcse.recipe import Recipe, load_recipe, with_values
from distcse.runs.backend import EmbeddingRequest, LocalBackend
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.precompute import prepare_tables
from distcse.runs.distillation.preflight import check_embedding
from distcse.teachers import table as table_module
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable
from tests.jobs import make_recipe, rows_embedded

TEACHER = "{backbone: words, class_path: 'tests.unit.test_reuse:Words'}"
OTHER = "{backbone: words, class_path: 'tests.unit.test_reuse:Words', kwargs: {seed: 1}}"


class Words:
    """A teacher whose vectors depend on a text alone, and not on its batch; it notes what it embeds."""

    embedded: ClassVar[list[str]] = []

    def __init__(self, seed: int = 0) -> None:
        self.fingerprint = "words"
        self._seed = seed

    def encode(self, texts: Sequence[str], **options: Any) -> np.ndarray:
        self.embedded.extend(texts)
        return np.stack([vector_of(text, self._seed) for text in texts])


def vector_of(text: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([crc32(text.encode()), seed]).normal(size=6).astype(np.float32)


def stored_of(texts: Sequence[str]) -> np.ndarray:
    """Return the vectors as a table stores them."""
    vectors = np.stack([vector_of(text) for text in texts])
    return table_module.normalize_rows(vectors, range(len(texts))).astype(np.float16)


def recipe_in(folder: Path, *overrides: str) -> Recipe:
    settings = (
        f"corpus.path={folder / 'corpus.txt'}",
        f"storage.cache={folder / 'cache'}",
        f"teachers.encoders=[{TEACHER}]",
        "teachers.shard_rows=10",
        "training.workers=0",
    )
    (folder / "corpus.txt").touch()
    return load_recipe("minilm-3layer", [*settings, *overrides])


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A recipe with one teacher, and shards of ten rows."""
    return recipe_in(tmp_path)


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

    def never_exceeds_its_total(self) -> bool:
        stages = [event for event in self.events if isinstance(event, StageProgress)]
        return all(event.done <= total for event in stages if (total := event.total))

    def stored(self) -> np.ndarray:
        """The first teacher's vectors as they are stored."""
        return self.tables[0].stored_vectors(np.arange(len(self.corpus)))


def replace_content(file: Path, change: Callable[[bytes], bytes]) -> None:
    """Write a new file, so that maps of the old one stay."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(change(content))


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1]) if content else b"x"


class Stopping(LocalBackend):
    """Ends in the middle of a pass."""

    def embed(self, request: EmbeddingRequest) -> None:
        super().embed(replace(request, missing=request.missing[:2]))
        raise InterruptedError


class Removing(LocalBackend):
    """Loses the earlier table when a pass reads it."""

    def embed(self, request: EmbeddingRequest) -> None:
        if request.reuse is not None:
            for file in request.reuse.source.directory.glob("*.npy"):
                file.unlink()
        super().embed(request)


class ChangingCorpora(RuleBasedStateMachine):
    """Passes over corpora that grow, shrink, change and repeat sentences, while what earlier ones stored is lost or damaged."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.tables: list[frozenset[str]] = []
        self.is_intact = True

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(
        numbers=st.lists(st.integers(0, 20), min_size=1, max_size=20),
        shard_rows=st.sampled_from([5, 8]),
        deduplicate=st.sampled_from(["none", "exact"]),
        backend=st.sampled_from([LocalBackend, LocalBackend, Stopping, Removing]),
    )
    def embed(self, numbers: list[int], shard_rows: int, deduplicate: str, backend: type[LocalBackend]) -> None:
        lines = [f"sentence {number}" for number in numbers]
        distinct = list(dict.fromkeys(lines))
        rows = distinct if deduplicate == "exact" else lines
        recipe = recipe_in(self.folder, f"teachers.shard_rows={shard_rows}", f"corpus.deduplicate={deduplicate}")
        Words.embedded.clear()
        if backend is not LocalBackend:
            with suppress(InterruptedError, ReusedTableError):
                Pass(recipe, lines, backend())
        before = len(Words.embedded)
        done = Pass(recipe, lines)
        np.testing.assert_array_equal(done.stored(), stored_of(rows))
        (table,) = done.tables
        assert sum(len(np.load(file)) for file in table.directory.glob("*.npy")) == len(distinct)
        assert table.missing_shards() == [] and (backend is Stopping or not list(table.directory.glob("reuse*")))
        assert done.embedded == [len(Words.embedded) - before] and done.never_exceeds_its_total()
        common = [sum(line in table for line in rows) for table in self.tables]
        best = [table for table, count in zip(self.tables, common, strict=True) if count == max(common)]
        self.is_intact &= backend is not Removing
        if self.is_intact:
            assert len(Words.embedded) in {len({*distinct} - table) for table in best or [frozenset()]}
        self.tables.append(frozenset(distinct))

    @precondition(lambda self: self.tables)
    @rule(place=st.integers(0, 2**16), damage=st.sampled_from([flip, lambda content: b"", None]))
    def damage(self, place: int, damage: Callable[[bytes], bytes] | None) -> None:
        files = [path for path in sorted(self.folder.rglob("*/*")) if path.suffix in (".npy", ".json", ".bin")]
        file = files[place % len(files)]
        file.unlink() if damage is None else replace_content(file, damage)
        self.is_intact = False


TestChangingCorpora = ChangingCorpora.TestCase
TestChangingCorpora.settings = settings(
    max_examples=6,
    stateful_step_count=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # to shrink a sequence takes minutes
)


def test_a_changed_corpus_embeds_its_new_sentences_alone_with_a_model(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences)
    changed = ["a new first sentence", *sentences[1:60], *sentences[70:150], "and a last one"]
    before, after = Pass(recipe, sentences[:150]), Pass(recipe, changed)
    assert (before.embedded, after.embedded) == ([150], [2])
    anew = Pass(with_values(recipe, {"storage.cache": str(tmp_path / "other")}), changed)
    assert anew.embedded == [len(changed)]
    # Batches of other shapes can change the last bit.
    np.testing.assert_allclose(*(each.stored().astype(np.float32) for each in (after, anew)), rtol=2e-3, atol=1e-6)
    expected = before.stored()[[sentences.index(line) for line in changed[1:-1]]]
    np.testing.assert_array_equal(after.stored()[1:-1], expected)
    kind = type(kind_of(recipe.teachers.encoders[0]))
    monkeypatch.setattr(kind, "open_embedder", lambda self: pytest.fail("loaded a model"))
    assert Pass(recipe, changed[::-1]).embedded == [0]


def test_a_teacher_that_was_added_embeds_itself_alone(recipe: Recipe, tmp_path: Path, sentences: list[str]) -> None:
    assert Pass(recipe, sentences[:20]).embedded == [20]
    two = recipe_in(tmp_path, f"teachers.encoders=[{TEACHER}, {OTHER}]")
    assert Pass(two, sentences[:20]).embedded == [0, 20]
    assert Pass(two, sentences[:21]).embedded == [1, 1]


def test_a_corpus_that_outgrows_its_shards_keeps_its_vectors(
    recipe: Recipe, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "SHARD_ROWS", 8)
    monkeypatch.setattr(table_module, "MOST_SHARDS", 3)
    chosen = with_values(recipe, {"teachers.shard_rows": "auto"})
    before, after = Pass(chosen, sentences[:24]), Pass(chosen, sentences[:26])
    assert [each.tables[0].identity.shard_rows for each in (before, after)] == [8, 16]
    assert [*before.embedded, *after.embedded] == [24, 2]


def test_a_dry_run_counts_the_new_sentences(recipe: Recipe, sentences: list[str]) -> None:
    Pass(recipe, sentences[:20])
    Path(str(recipe.corpus.path)).write_text("\n".join(sentences[:21]) + "\n")
    notes: list[str] = []
    check_embedding(recipe, LocalBackend(), Reporter(lambda event: notes.append(str(getattr(event, "note", "")))))
    assert sum("1 of 21 rows to embed" in note for note in notes) == 1


def test_tables_of_a_sweep_are_hashed_once(
    recipe: Recipe, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials check sizes alone: the sweep has hashed the shards before."""
    Pass(recipe, sentences[:20])
    monkeypatch.setattr(table_module, "load_checked_label", lambda *paths: pytest.fail("hashed a shard"))
    after = Pass(recipe, sentences[:20], verifies=False)
    assert after.embedded == [0]
    table = after.tables[0]
    for damage in (lambda file: replace_content(file, lambda content: content[:-9]), Path.unlink):
        damage(table.directory / "shard-00001.npy")
        assert table.missing_shards(verify=False) == [1]


def test_a_table_keeps_a_bounded_number_of_shards_open(
    recipe: Recipe, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Pass(with_values(recipe, {"teachers.shard_rows": 1}), sentences[:20]).tables[0]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (16 * table_module.OPEN_SHARE, -1))
    table = EmbeddingTable(table.store, table.identity)
    np.testing.assert_array_equal(table.stored_vectors(np.arange(20)), stored_of(sentences[:20]))
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "shard-" in line}
    assert 0 < sum(str(table.directory) in path for path in mapped) <= 16
