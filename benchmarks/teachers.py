"""Rows 8 to 12, 30, 31 (sentences) and 32: teachers, their cache, dev scores and tokens.

python -m benchmarks.teachers --data ../shared/data [--quick] [--rows 11]
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from scipy.stats import kendalltau

from benchmarks.material import MINILM, fast_precisions, fill, list_recipe, prepared, stand_in, table_sources
from benchmarks.options import Options, script
from benchmarks.protocol import (
    Effort,
    Figure,
    Report,
    counted,
    interleave,
    machine,
    of_ratio,
    of_spread,
    timed,
)
from benchmarks.row_memory import anonymous_bytes
from distcse.devices.device import CPU
from distcse.devices.host import release_memory
from distcse.evaluation import VectorModel, labelled_dev, sts_score
from distcse.losses import list_mle
from distcse.models import Encoder, resolve_model
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.frozen_pass import by_length
from distcse.recipe import CorpusSection, TeacherSection
from distcse.storage import open_store
from distcse.teachers.embedding import embed_shards, table_of
from distcse.teachers.table import SHARD_ROWS, EmbeddingTable, TableIdentity
from distcse.teachers.teacher import LiveTeacher, TableTeacher
from distcse.text import Corpus, TokenTable
from tests.counting import counted_calls, passes_of, with_padding
from tests.training_step import TrainingStep
from tests.wikipedia import wiki_file, wiki_sentences

LISTS, LENGTH = 10, 128
TRIALS, EPOCHS = 16, 4


def measure(options: Options) -> Report:
    """All rows of this script."""
    effort = Effort(pairs=options.pairs, shortest=0.0 if options.quick else 0.5, warmups=1 if options.quick else 3)
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        root, texts = Path(folder), wiki_sentences(options.data, 200 if options.quick else 2000)
        parts: dict[tuple[int, ...], Callable[[], list[Figure]]] = {
            (8,): lambda: sweep(root / "sweep", options, effort),
            (9,): lambda: cache(root / "cache", 2000 if options.quick else 100_000, effort),
            (10,): lambda: fidelity(root / "fidelity", options, texts),
            (11,): lambda: encoding(texts[: 64 if options.quick else 384], effort),
            (12,): lambda: filled(options),
            (30,): lambda: memory(root, options),
            (31,): lambda: dev_score(options),
            (32,): lambda: tokens(root / "tokens", options, effort),
        }
        for rows, part in parts.items():
            if options.wants(*rows):
                print(f"row {rows[0]} …", flush=True)
                found += part()
    return Report("teachers", machine(), {"pairs": options.pairs, "threads": 1}, found, options.quick)


def sweep(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Row 8: what goes through a teacher, and what a pass costs compared with T trials of E epochs."""
    n = 8 if options.quick else 32
    teacher = {"backbone": MINILM, "pooling": "mean", "max_length": 32}
    objective = {"consistency": None, "rank": None}
    file = wiki_file(options.data)
    spec, tables = prepared(list_recipe(folder, file, MINILM, [teacher], {}, n, 4 * n))
    corpus, table = Corpus.open(spec.corpus), tables[0]
    assert table is not None
    encoder = Encoder.from_section(spec.recipe.teachers.encoders[0]).eval()
    unique = len(set(corpus.texts(range(len(corpus)))))
    fresh = table_of(spec.recipe.teachers.encoders[0], corpus, open_store(folder / "fresh"), len(corpus))
    with passes_of(encoder) as first:
        list(embed_shards(encoder, corpus, fresh, [0], None))
    again = table_of(spec.recipe.teachers.encoders[0], corpus, open_store(folder / "fresh"), len(corpus))
    simcse, _ = prepared(list_recipe(folder / "simcse", file, MINILM, [], objective, n, 4 * n))
    step = TrainingStep(simcse, [])
    distilled = TrainingStep(spec, table_sources(spec, tables))
    texts = corpus.texts(range(n))
    ways = {"pass": lambda: encoder.encode(texts), "SimCSE": step, "distilled": distilled}
    rounds = interleave({name: timed(way) for name, way in ways.items()}, effort, again="SimCSE")  # type: ignore[arg-type]

    def cost(seconds: Any) -> float:
        trials = TRIALS * EPOCHS
        return float((seconds["pass"] + trials * seconds["distilled"]) / (trials * seconds["SimCSE"]))

    at = f"MiniLM from MiniLM, N = {n}"
    return [
        counted(8, "sentence encodings of a first run / unique rows", first.rows / unique, f"{unique} rows"),
        counted(8, "sentence encodings of a second run", len(again.missing_shards()) * len(corpus), f"{unique} rows"),
        of_spread(8, "sweep / T SimCSE trials, T = 16, E = 4", rounds.of(cost), at, rounds.noise()),
    ]


def cache(folder: Path, rows: int, effort: Effort) -> list[Figure]:
    """Row 9: tables of base's and large's width, opened and read in separate processes."""
    shard = 8192
    draw = np.random.default_rng(0)
    tables = []
    for width in (768, 1024):
        identity = TableIdentity(str(width), "made up", rows, None, None, "", "fp32", shard)
        table = EmbeddingTable.locate(open_store(folder), identity)
        fill(table, width, draw)
        tables.append(table)
    size = sum(file.stat().st_size for table in tables for file in table.directory.iterdir())
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        measured = [
            pool.apply(_opened, ([(t.directory, t.identity) for t in tables],)) for _ in range(min(effort.pairs, 5))
        ]
    at = f"{rows:,} rows of 768 and 1,024 numbers"
    opening = sorted(seconds for seconds, _ in measured)
    private = max(grown for _, grown in measured) / 1e6
    return [
        counted(9, "bytes a sentence / 2 · Σ dimensions", round(size / rows / (2 * 1792), 5), at),
        Figure(9, "time to open", opening[len(opening) // 2], opening[0], opening[-1], pairs=len(opening), setting=at),
        Figure(
            9, "private memory of a worker that opens it", private, private, private, pairs=len(measured), setting=at
        ),
    ]


def _opened(tables_on_disk: Sequence[tuple[Path, TableIdentity]]) -> tuple[float, int]:
    """Seconds to the first vectors; bytes that a hundred gathers left besides the files' own pages, which all workers share."""
    before, begun = anonymous_bytes(), time.perf_counter()
    tables = [EmbeddingTable(open_store(directory), identity) for directory, identity in tables_on_disk]
    for table in tables:
        table.vectors([0])
    opened = time.perf_counter() - begun
    draw = np.random.default_rng(0)
    for _ in range(100):
        for table in tables:
            table.vectors(draw.integers(0, table.identity.rows, LENGTH))
    return opened, anonymous_bytes() - before


def fidelity(folder: Path, options: Options, texts: list[str]) -> list[Figure]:
    """Row 10: lists of 128 real sentences, from the table and by the encoder itself."""
    length = 16 if options.quick else LENGTH
    file = folder / "text.txt"
    folder.mkdir()
    file.write_text("\n".join(texts[: LISTS * length]) + "\n", encoding="utf-8")
    corpus = Corpus.prepare(CorpusSection(path=str(file)), open_store(folder))
    section = TeacherSection(backbone=MINILM, pooling="mean", max_length=32, precision="fp32")
    encoder, table = Encoder.from_section(section).eval(), table_of(section, corpus, open_store(folder), len(corpus))
    list(embed_shards(encoder, corpus, table, [0], None))
    lists = len(corpus) // length
    columns = np.arange(lists * length).reshape(lists, length)
    stored = TableTeacher(table).similarities(columns, slice(None))
    live = LiveTeacher(encoder, corpus, "fp32", None).similarities(columns, slice(None))
    taus = [
        kendalltau(a, b).statistic for a, b in zip(stored.reshape(-1, length), live.reshape(-1, length), strict=True)
    ]
    student = torch.rand(length, length, generator=torch.Generator().manual_seed(0))
    cosines = [_gradient_cosine(student, stored[number], live[number]) for number in range(lists)]
    at, apart = f"{lists} lists of {length}", float(np.abs(stored - live).max())
    return [
        counted(10, "largest difference of a cosine", apart, at),
        counted(10, "Kendall's τ of a list", float(np.mean(taus)), at),
        counted(10, "cosine of the ListMLE gradients", min(cosines), at),
    ]


def _gradient_cosine(student: torch.Tensor, one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    found = []
    for lists in (one, other):
        cosines = student.clone().requires_grad_()
        list_mle(cosines, torch.from_numpy(lists), 0.05).mean().backward()
        assert cosines.grad is not None
        found.append(cosines.grad.flatten().double())
    return float(torch.cosine_similarity(found[0], found[1], dim=0))


def encoding(texts: list[str], effort: Effort) -> list[Figure]:
    """Row 11: real sentences by sentence-transformers' defaults, by its best batch size, and by ours."""
    from sentence_transformers import SentenceTransformer

    theirs = SentenceTransformer(str(resolve_model(MINILM)), device="cpu")
    theirs.max_seq_length = 32
    reference = theirs.encode(texts, normalize_embeddings=True)
    ours, least = {}, {}
    for precision in fast_precisions():
        ours[precision] = Encoder.load(MINILM, max_length=32).eval()
        use_mkldnn_linear(ours[precision], precision)
        mine = ours[precision].encode(texts, normalize=True, precision=precision)
        least[precision] = float((mine * reference).sum(axis=1).min())
    cosines = ", ".join(f"{precision} {cosine:.6f}" for precision, cosine in least.items())
    print(f"least cosine with sentence-transformers: {cosines}")
    if least["fp32"] < 0.9999:
        raise SystemExit("the two encoders do not give the same vectors; nothing is timed")
    ways: dict[str, Callable[[], object]] = {
        "default": lambda: theirs.encode(texts),
        "tuned": lambda: theirs.encode(texts, batch_size=128),
    }
    ways |= {precision: partial(model.encode, texts, precision=precision) for precision, model in ours.items()}
    rounds = interleave({name: timed(way) for name, way in ways.items()}, effort, again=fast_precisions()[-1])
    at = f"MiniLM, {len(texts)} sentences, 32 tokens"
    best = "tuned" if rounds.ratio("tuned", "default").median < 1 else "default"
    half = [of_ratio(11, "default (fp32) / bf16", rounds, "default", "bf16", at)] if "bf16" in ours else []
    return [
        *half,
        of_ratio(11, "tuned, same dtype (fp32)", rounds, best, "fp32", at),
    ]


def filled(options: Options) -> list[Figure]:
    """Row 12's teacher pass: the batches of one shard, by their tokens."""
    rows = 200 if options.quick else SHARD_ROWS
    encoder, budget = Encoder.load(MINILM, max_length=32), CPU.frozen_batch_tokens
    ids = encoder.token_ids(wiki_sentences(options.data, rows))
    filled = sum(map(len, ids)) / with_padding(ids, by_length(ids, budget))
    return [counted(12, "teacher pass", round(filled, 5), f"a shard of {rows:,} rows")]


def memory(folder: Path, options: Options) -> list[Figure]:
    """Row 30: what a process that hosts a teacher holds beyond one that imported the same and hosts none."""
    found = []
    models = {"MiniLM, fp32": MINILM}
    if not options.quick:
        models["BERT-base size, fp32"] = str(stand_in(folder / "base", "base"))
    context = multiprocessing.get_context("spawn")
    for name, model in models.items():
        with context.Pool(1) as pool:
            held, weights = pool.apply(_held, (model,))
        allowed = 1.25 * weights + 64e6
        terms = {"held MB": held / 1e6, "weights MB": weights / 1e6}
        found.append(
            Figure(30, name, held / allowed, held / allowed, held / allowed, setting="one process", terms=terms)
        )
    return found


def _held(model: str) -> tuple[int, int]:
    torch.set_num_threads(1)
    for name in ("transformers.models.bert.modeling_bert", "distcse.teachers.kinds"):
        importlib.import_module(name)  # the imports are every worker's
    gc.collect()
    release_memory()
    before = psutil.Process().memory_info().rss
    encoder = Encoder.load(model, pooling="mean", max_length=32).eval()
    weights = sum(p.numel() * p.element_size() for p in encoder.parameters())
    use_mkldnn_linear(encoder)
    encoder.encode(["A sentence of a few words."] * 8)
    release_memory()
    return psutil.Process().memory_info().rss - before, weights


def dev_score(options: Options) -> list[Figure]:
    """Row 31's count: sentences through the encoder for a score on STS-B dev."""
    encoder, pairs = Encoder.load(MINILM).eval(), labelled_dev(options.data)
    if options.quick:
        encode, calls = encoder.encode, counted_calls(len)[1]
        VectorModel(lambda texts: _noted(texts, calls, encode)).prepare(pairs.unique[:50])
        return [counted(31, "sentences encoded a score", sum(calls))]
    with passes_of(encoder) as seen:
        sts_score(VectorModel(encoder.encode), pairs)
    return [counted(31, "sentences encoded a score", seen.rows)]


def _noted(texts: Sequence[str], calls: list[int], encode: Callable[..., Any]) -> Any:
    calls.append(len(texts))
    return encode(texts)


def tokens(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Row 32: how often a sentence is tokenized, and how fast."""
    limit = 500 if options.quick else 20_000
    corpus = Corpus.prepare(CorpusSection(path=str(wiki_file(options.data)), limit=limit), open_store(folder))
    encoder = Encoder.load(MINILM, max_length=32)
    seen: list[int] = []
    first = TokenTable.prepare(corpus, encoder.tokenizer, 32, open_store(folder / "first"), seen.append)
    passes = max(seen) / len(corpus)
    again: list[int] = []
    second = TokenTable.prepare(corpus, encoder.tokenizer, 32, open_store(folder / "first"), again.append)
    assert not first.reused and second.reused
    caches = iter(range(10**6))

    def fresh() -> None:
        TokenTable.prepare(corpus, encoder.tokenizer, 32, open_store(folder / str(next(caches))))

    rounds = interleave({"tokenize": timed(fresh)}, Effort(effort.pairs, 1, 0.0))
    rate = rounds.of(lambda s: limit / s["tokenize"])
    return [
        counted(32, "passes over the corpus, first run", passes),
        counted(32, "passes over the corpus, second run", max(again, default=0) / len(corpus)),
        of_spread(32, "rate, one core", rate, f"{limit:,} sentences"),
    ]


if __name__ == "__main__":
    script("benchmarks.teachers", __doc__, measure)
