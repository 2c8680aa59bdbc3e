"""What transformers reports on the terminal while distcse loads and saves models: nothing, but what matters is logged."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers.utils.logging import enable_progress_bar

from distcse.compat.transformers import LIBRARY_LOGGER, without_noise
from distcse.models import CrossEncoder, Encoder
from distcse.models.detection import build_detector
from distcse.recipe import DetectionSection, StudentSection
from tests.models import make_masked_lm


@pytest.fixture(params=[False, True], ids=["its own handler", "as where CI=1"])
def reports(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[logging.LogRecord]]:
    """Records of transformers' loggers that would reach the terminal; CI=1 lets them reach the root's handlers too."""
    library, records = logging.getLogger(LIBRARY_LOGGER), list[logging.LogRecord]()
    monkeypatch.setattr(library, "level", logging.WARNING)
    monkeypatch.setattr(library, "propagate", request.param)
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    library.addHandler(handler)
    enable_progress_bar()
    yield records
    library.removeHandler(handler)


def test_models_with_other_heads_are_loaded_and_saved_in_silence(
    tiny: Callable[..., Path],
    tmp_path: Path,
    reports: list[logging.LogRecord],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with without_noise():
        source = make_masked_lm(tmp_path / "masked", tiny())
    enable_progress_bar()
    student = StudentSection(backbone=str(source))
    encoder = Encoder.from_section(student)
    encoder.save(tmp_path / "saved")
    CrossEncoder.fresh(source, 16).save(tmp_path / "cross")
    build_detector(DetectionSection(generator=str(source)), encoder, Encoder.from_section(student), "fp32")
    output = capfd.readouterr()
    assert not reports and not caplog.records and not output.err and not output.out


def test_weights_of_layers_that_the_config_lacks_are_logged_once(
    tiny: Callable[..., Path], tmp_path: Path, reports: list[logging.LogRecord], caplog: pytest.LogCaptureFixture
) -> None:
    Encoder.load(tiny(), pooling="mean").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    for _ in range(2):
        Encoder.load(tmp_path)
    (line,) = (record.getMessage() for record in caplog.records)
    assert (
        str(tmp_path) in line
        and "weights are not used" in line
        and "encoder.layer.1." in line
        and "config.json" in line
    )
    assert not reports
