"""Permanent failures on a cluster end in one error of distcse, without endless restarts and remote tracebacks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from distcse.cluster import embedding_actors
from distcse.errors import DivergedError, TeacherOutputError, TeacherServerError
from distcse.events import LogMessage, Reporter
from distcse.recipe import Recipe, with_values
from tests.backends import run
from tests.endpoints import open_endpoint, reply_with
from tests.failures import fails_with
from tests.jobs import make_recipe

pytestmark = pytest.mark.cluster

ON_RAY = (
    "training.workers=2",
    "training.cpus_per_worker=1.0",
    "evaluation.final_suites=[]",
    "teachers.embedding_workers=1",
)


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *ON_RAY)


@pytest.mark.slow
def test_a_loss_that_overflows_is_reported_once(cluster: None, recipe: Recipe) -> None:
    messages: list[str] = []
    reporter = Reporter(lambda event: messages.append(event.text) if isinstance(event, LogMessage) else None)
    with fails_with(DivergedError, "loss", "step 0 (rows ", " of the corpus (16)"):
        run(with_values(recipe, {"objective.info_nce.weight": 1e39}), reporter)
    # Apart from warnings of settings, and lines about what is being waited for.
    waits = ("[DCSE-W", "teacher ", "workers ")
    (directory,) = (message for message in messages if not message.startswith(waits))
    assert directory.startswith("run directory")


def test_a_teacher_that_outputs_nan_is_reported_in_one_line(cluster: None, recipe: Recipe) -> None:
    with open_endpoint(lambda body, _: reply_with([float("nan"), 1.0] for _ in body["input"])) as url:
        endpoint = {"backbone": "m", "endpoint": {"url": url, "retries": 0}}
        with fails_with(TeacherOutputError, "not finite", "row ") as raised:
            run(with_values(recipe, {"teachers.encoders": [endpoint]}), Reporter())
    assert "\n" not in str(raised.value)


class CrashingActor(embedding_actors.EmbeddingActor):
    """Crashes at every shard, as when out of memory."""

    def embed(self, shards: Sequence[int]) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


@pytest.mark.slow
def test_an_embedding_actor_that_always_crashes_is_not_restarted_forever(
    cluster: None, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_actors, "EmbeddingActor", CrashingActor)
    backbone = recipe.teachers.encoders[0].backbone
    with fails_with(TeacherServerError, backbone, "teachers.tokens_per_batch", "teachers.embedding_workers") as raised:
        run(recipe, Reporter())
    assert "\n" not in str(raised.value)
