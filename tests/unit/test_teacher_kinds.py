"""The kinds of teachers: which section selects which, what each answers, and fingerprints that tables in a cache depend on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcse.errors import ModelNotFoundError, UnsuitableTeacherError
from distcse.events import Reporter, StepReport
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import EndpointSection, Recipe, TeacherSection
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.preflight import embed_corpus
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.runs.result import StudentResult
from distcse.storage import open_store
from distcse.teachers.kinds import TeacherKind, kind_of
from distcse.teachers.kinds.cross_encoder import PairTeacher
from distcse.teachers.table import TableIdentity
from distcse.teachers.teacher import LiveTeacher
from distcse.text import Corpus
from tests.backends import run
from tests.commands import command
from tests.endpoints import open_endpoint, reply_with
from tests.failures import fails_with
from tests.jobs import make_recipe

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
