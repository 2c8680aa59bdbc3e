"""Teachers other than an encoder's table: HTTP endpoints, cross-encoders, rank noise, and combinations of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcse.errors import EndpointError, InvalidValueError, UnsuitableTeacherError
from distcse.events import Reporter, StepReport
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import EndpointSection, TeacherSection
from distcse.runs.distillation.result import StudentResult
from distcse.teachers.kinds import kind_of
from distcse.teachers.kinds.cross_encoder import PairTeacher
from distcse.teachers.kinds.endpoint import Endpoint
from distcse.text import Corpus
from tests.backends import run
from tests.endpoints import Reply, open_endpoint, reply_with
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import make_cross_encoder, make_masked_lm


class Server:
    """An embeddings endpoint in front of a real encoder, with failures on request."""

    def __init__(self, encoder: Encoder) -> None:
        self.url = ""
        self.encoder = encoder
        self.lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.failures: list[int] = []
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer

    def answer(self, body: dict[str, Any], headers: Message) -> Reply:
        with self.lock:
            self.bodies.append(body)
            self.keys.append(headers.get("Authorization"))
            if self.failures:
                return Reply('{"error": "busy"}', self.failures.pop(0))
            vectors = self.encoder.encode(body["input"])
        content = json.loads(reply_with(vectors.tolist()).text)
        content["data"].reverse()  # not in the order of the texts
        return Reply(json.dumps(self.change(content)))


@pytest.fixture
def server(tiny: Callable[..., Path]) -> Iterator[Server]:
    server = Server(Encoder.load(tiny("roberta", width=64), pooling="mean"))
    with open_endpoint(server.answer) as server.url:
        yield server


def test_an_endpoint_answers_like_its_encoder(
    server: Server, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    section = EndpointSection(url=server.url, batch_size=7, connections=3, api_key_env="MY_KEY")
    done: list[int] = []
    found = Endpoint("name", section, prompt="query: ").encode(sentences[:50], normalize=True, on_progress=done.append)
    expected = server.encoder.encode([f"query: {text}" for text in sentences[:50]], normalize=True)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(server.bodies) == 8 and {body["model"] for body in server.bodies} == {"name"} and done[-1] == 50
    assert max(len(body["input"]) for body in server.bodies) == 7 and set(server.keys) == {"Bearer secret"}


def test_a_template_is_filled_in_before_the_request(server: Server) -> None:
    section = EndpointSection(url=server.url)
    Endpoint("name", section, prompt="Find alike: {sentence} Now.").encode(["A man", "{sentence}"])
    assert server.bodies[0]["input"] == ["Find alike: A man Now.", "Find alike: {sentence} Now."]
    plain, template = (
        kind_of(TeacherSection(backbone="name", endpoint=section, prompt=p)).source_fingerprint()
        for p in ("a: ", "{sentence}")
    )
    assert plain != template  # old tables, which embedded the literal template, are not reused


def test_requests_to_a_busy_endpoint_are_retried(server: Server, sentences: list[str]) -> None:
    server.failures = [503, 429]
    section = EndpointSection(url=server.url, connections=1, retries=3)
    assert Endpoint("name", section).encode(sentences[:3]).shape == (3, 64)
    assert len(server.bodies) == 3


def test_failures_of_an_endpoint_are_reported(server: Server, sentences: list[str]) -> None:
    section = EndpointSection(url=server.url, connections=1, retries=1)
    server.failures = [401]
    with fails_with(EndpointError, f"teacher name at {server.url}", "401", '{"error": "busy"}', section.api_key_env):
        Endpoint("name", section).encode(sentences[:2])
    server.failures = [503, 503]
    with fails_with(EndpointError, server.url, "503"):
        Endpoint("name", section).encode(sentences[:2])
    server.change = lambda answer: {"data": answer["data"][:1]}
    with fails_with(EndpointError, server.url, "2 embeddings"):
        Endpoint("name", section).encode(sentences[:2])
    unreachable = EndpointSection(url="http://127.0.0.1:9", retries=0)
    with fails_with(EndpointError, unreachable.url, "0 retries"):
        Endpoint("name", unreachable).encode(sentences[:2])


def test_an_endpoint_fills_a_table_once(
    server: Server, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    named = ("teachers.encoders.0.backbone=name", f"teachers.encoders.0.endpoint.url={server.url}")
    overrides = (*named, "teachers.encoders.0.max_length=null")
    result, losses = train_recipe(
        make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *LISTS_ALONE, *overrides)
    )
    assert has_decreased(losses)
    assert result.evaluation is not None and result.evaluation.models[-1].kind == "endpoint"
    texts = sum(len(body["input"]) for body in server.bodies)
    server.bodies.clear()
    run(make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *overrides), Reporter())
    again = sum(len(body["input"]) for body in server.bodies)
    assert texts >= len(sentences) and again <= 64  # only the held-out rows of the final evaluation


def test_a_cross_encoder_serves_its_scores(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    scorer = CrossEncoder.load(make_cross_encoder(tmp_path / "cross", tiny("bert")))
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("bert")], sentences)
    corpus = Corpus.prepare(recipe.corpus, tmp_path / "cache")
    columns = np.array([[3, 1, 4, 2], [9, 8, 7, 6]])
    lists = PairTeacher(scorer, corpus, "fp32", 512).similarities(columns, slice(1, 3))
    assert lists.shape == (2, 2, 4)
    expected = scorer.score([(sentences[1], sentences[n]) for n in (3, 1, 4, 2)])
    np.testing.assert_allclose(lists[0, 0], expected, atol=1e-6)


def train_recipe(recipe: Any) -> tuple[StudentResult, list[dict[str, float]]]:
    events: list[Any] = []
    result = run(recipe, Reporter(events.append))
    return result, [event.losses for event in events if isinstance(event, StepReport)]


def has_decreased(losses: list[dict[str, float]], part: str = "rank") -> bool:
    """Return whether a loss is lower in the last third of a run than in the first."""
    values, third = [loss[part] for loss in losses], len(losses) // 3
    return sum(values[-third:]) < sum(values[:third])


LISTS_ALONE = (
    "objective.info_nce=null",
    "objective.consistency=null",
    "student.projection=none",
    "student.dropout=0.0",
    "training.epochs=3",
    "training.lr=2e-3",
)


@pytest.mark.slow
def test_list_mle_on_rank_space_lists(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    overrides = [
        f"teachers.encoders.{n}.{override}" for n in (0, 1) for override in ("similarity=rank", "num_references=200")
    ]
    teachers = [tiny("roberta"), tiny("minilm")]
    form = "objective.rank.form=list_mle"
    _, losses = train_recipe(make_recipe(tmp_path, tiny("bert"), teachers, sentences, *LISTS_ALONE, *overrides, form))
    assert has_decreased(losses)


def test_three_teachers_of_three_kinds(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    teachers = [tiny("roberta", width=64), tiny("minilm"), tiny("distilbert")]
    overrides = (
        "teachers.encoders.2.similarity=rank",
        "teachers.encoders.2.num_references=150",
    )
    _, losses = train_recipe(make_recipe(tmp_path, tiny("bert"), teachers, sentences, *LISTS_ALONE, *overrides))
    assert has_decreased(losses)


@pytest.mark.slow
def test_rank_cse_with_detection(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    overrides = (
        "student.projection=batch_norm_mlp",
        f"objective.detection.generator={generator}",
        "objective.rank_regression.weight=0.5",
        "objective.rank_regression.lower=-1",
        "training.epochs=5",
    )
    _, losses = train_recipe(make_recipe(tmp_path, tiny("bert"), [tiny("roberta")], sentences, *overrides))
    parts = {"info_nce", "consistency", "rank", "rank_regression", "detection"}
    assert parts <= losses[-1].keys() and has_decreased(losses) and has_decreased(losses, "detection")


@pytest.mark.slow
def test_training_with_a_cross_encoder_and_an_encoder(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    cross = make_cross_encoder(tmp_path / "cross", tiny("bert"))
    overrides = ("training.max_steps=44", "training.batch_size=8")
    teachers = [tiny("roberta"), cross]
    result, losses = train_recipe(make_recipe(tmp_path, tiny("bert"), teachers, sentences, *LISTS_ALONE, *overrides))
    assert has_decreased(losses)
    assert result.evaluation is not None and result.evaluation.models[-1].kind == "cross-encoder"
    with fails_with(UnsuitableTeacherError, str(cross), "rank space", "similarity: cosine"):
        train_recipe(make_recipe(tmp_path, tiny("bert"), [cross], sentences, "teachers.encoders.0.similarity=rank"))


def test_an_endpoints_url_is_checked(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    with fails_with(InvalidValueError, "teachers.encoders.0.endpoint.url"):
        make_recipe(tmp_path, tiny("bert"), [tiny("bert")], sentences, "teachers.encoders.0.endpoint.url=host:80")
