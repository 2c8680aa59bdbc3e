"""What a run learns from, ready to be read: text, tokens, teachers' tables; kept in the cache and found there again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distcse.corpus import Corpus, TokenTable
from distcse.encoder import Encoder
from distcse.events import Stage, Watch
from distcse.recipe import Recipe
from distcse.student.houses import House
from distcse.student.plan import Job, Plan
from distcse.teachers import EmbeddingTable, table_of, uses_table
from distcse.training.claim import Claim


@dataclass(frozen=True)
class Text:
    """A recipe's corpus as its student reads it."""

    corpus: Corpus
    tokens: TokenTable
    start: Encoder
    """The student before it learned anything."""

    @classmethod
    def prepare(cls, recipe: Recipe, watch: Watch) -> Text:
        """Read and tokenise, or find both in the cache. Too few rows for one batch are told here."""
        cache = Path(recipe.storage.cache)
        corpus = Corpus.prepare(recipe.corpus, cache, _progress(watch, "corpus", recipe.corpus.limit))
        blank = f", {corpus.blank_rows:,} blank rows skipped" if corpus.blank_rows else ""
        _ended(watch, "corpus", len(corpus), f"{len(corpus):,} sentences{blank}{', reused' if corpus.reused else ''}")
        start = Encoder.from_section(recipe.student)
        tokens = TokenTable.prepare(
            corpus,
            start.tokenizer,
            start.max_length,
            cache,
            _progress(watch, "tokens", len(corpus)),
            prompt=start.prompt,
        )
        _ended(watch, "tokens", len(corpus), "reused" if tokens.reused else "tokenised once")
        text = cls(corpus, tokens, start)
        Plan(text.job(recipe, Path()), rank=0, workers=max(1, recipe.training.workers))
        return text

    def job(self, recipe: Recipe, run: Path, claim: Claim | None = None) -> Job:
        """What a worker is told to learn from this text."""
        return Job(recipe, run, self.corpus.directory, self.tokens.directory, claim)


def prepare_tables(recipe: Recipe, corpus: Corpus, house: House, watch: Watch) -> list[EmbeddingTable | None]:
    """The teachers' tables, whole: rows that are missing are embedded. None for a teacher that answers live."""
    section = recipe.teachers
    tables: list[EmbeddingTable | None] = []
    for number, teacher in enumerate(section.encoders):
        if not uses_table(section, teacher):
            tables.append(None)
            continue
        table = table_of(teacher, corpus, Path(recipe.storage.cache), section.shard_rows)
        stage = f"teacher {number}"
        missing = table.missing_shards()
        rows = sum(len(table.shard_range(shard)) for shard in missing)
        if missing:
            house.build(teacher, section, corpus, table, missing, _progress(watch, stage, rows))
        _ended(watch, stage, rows, f"{rows:,} embedded, {len(corpus) - rows:,} reused")
        tables.append(table)
    return tables


def _ended(watch: Watch, stage: str, done: int, note: str) -> None:
    watch.post(Stage(stage, done, done, "sentences", finished=True, note=note))


def _progress(watch: Watch, stage: str, total: int | None) -> Callable[[int], None]:
    return lambda done: watch.post(Stage(stage, done, total, "sentences"))
