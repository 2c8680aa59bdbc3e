"""What fails every time ends in one message of ours on a cluster too: no endless restarts, no remote traceback."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.errors import DivergedError, TeacherError
from distcse.events import LogMessage, Reporter
from distcse.experiments.distillation.run import run
from distcse.recipe import Recipe, with_values
from distcse.teachers import embedding_actors
from tests.jobs import make_recipe
from tests.unit.test_numbers import answering

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
def test_a_loss_that_overflows_is_told_once(cluster: None, recipe: Recipe) -> None:
    told: list[str] = []
    reporter = Reporter(lambda event: told.append(event.text) if isinstance(event, LogMessage) else None)
    with pytest.raises(DivergedError, match=r"^loss is not finite at step 0 \(rows .* of the corpus \(16\)\)"):
        run(with_values(recipe, {"objective.info_nce.weight": 1e39}), reporter)
    assert len(told) == 1 and told[0].startswith("run directory")


def test_a_teacher_that_gives_no_number_is_told_in_a_line(cluster: None, recipe: Recipe) -> None:
    with answering(lambda text: [float("nan"), 1.0]) as url:
        one = {"backbone": "m", "endpoint": {"url": url, "retries": 0}}
        with pytest.raises(TeacherError) as ended:
            run(with_values(recipe, {"teachers.encoders": [one]}), Reporter())
    assert "gives a vector that is not finite for row" in str(ended.value) and "\n" not in str(ended.value)


class Dying(embedding_actors.EmbeddingActor):
    """Loses its process at every shard, as one that is out of memory."""

    def embed(self, shard: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


@pytest.mark.slow
def test_a_builder_that_always_dies_is_not_started_for_ever(
    cluster: None, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding_actors, "EmbeddingActor", Dying)
    with pytest.raises(TeacherError, match="was started again and again and lost its process each time") as ended:
        run(recipe, Reporter())
    assert "\n" not in str(ended.value)
