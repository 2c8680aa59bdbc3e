"""Ranks at inference (RankEncoder Eq. 7): from the command line, and at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from distcse import cli
from distcse.errors import CorpusTooSmallError, EncoderSettingError, UnsupportedModelError
from distcse.evaluation import Contamination, Evaluation, LoadOptions, collect, open_candidate
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.rank_space import RankSpaceEncoder, draw_references
from distcse.recipe import Recipe, load_recipe
from tests.backends import run
from tests.models import make_cross_encoder

MakeRecipe = Callable[..., Recipe]


def equation_7(
    encoder: Encoder, references: list[str], first: list[str], second: list[str], weight: float, normalize: bool = True
) -> np.ndarray:
    """Eq. 7 with SciPy, in float64."""
    left, right = (encoder.encode(texts, normalize=True).astype(np.float64) for texts in (first, second))
    ranked = encoder.encode(references, normalize=normalize).astype(np.float64)
    correlations = [spearmanr(ranked @ u, ranked @ v).statistic for u, v in zip(left, right, strict=True)]
    return weight * np.array(correlations) + (1 - weight) * (left * right).sum(axis=1)


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("\n\n".join(sentences[:300]) + "\n")
    return file


@pytest.mark.parametrize("options", [[], ["--inner-product", "--weight", "0.3"]])
def test_the_command_stores_a_model_that_scores_by_equation_7(
    options: list[str],
    corpus: Path,
    tiny: Callable[..., Path],
    sentences: list[str],
    labelled: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=16)
    encoder.save(tmp_path / "model")
    Contamination.measure(["A dog runs."], [["A dog runs.", "A cat."]]).write(tmp_path / "model")
    out = tmp_path / "ranker"
    given = [str(tmp_path / "model"), "--corpus", str(corpus), "--out", str(out), "--references", "200", *options]
    assert cli.main(["rank", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["references"] == 200
    references = [sentences[row] for row in draw_references(300, 200)]
    weight, normalize = (0.3, False) if options else (0.1, True)
    expected = equation_7(encoder, references, sentences[300:330], sentences[330:360], weight, normalize)
    opened = open_candidate("ranks", str(out), LoadOptions(precision="fp32"))
    # Rounding may swap nearly tied references; with 200 references, a swap changes the score by 1e-5.
    np.testing.assert_allclose(opened.model.similarities(sentences[300:330], sentences[330:360]), expected, atol=1e-4)
    assert opened.contamination == Contamination.read(tmp_path / "model") and opened.contamination.overlap
    models = [f"student={tmp_path / 'model'}", f"ranks={out}"]
    assert cli.main(["evaluate", *models, "--data", str(labelled), "--precision", "fp32", "--quiet"]) == 0
    assert "ranks" in capsys.readouterr().out


def test_a_run_measures_and_stores_its_student_with_ranks(recipe_with: MakeRecipe, labelled: Path) -> None:
    overrides = (
        f"evaluation.data={labelled}",
        "evaluation.final_suites=[sts, retrieval, agreement]",
        "evaluation.rank_inference={weight: 0.4, num_references: 150}",
        "training.max_steps=2",
    )
    result = run(recipe_with(*overrides), Reporter())
    student = Encoder.load(result.directory.model)
    lines = Path(str(result.recipe.corpus.path)).read_text().splitlines()
    references = [lines[row] for row in draw_references(len(lines), 150)]
    stored = RankSpaceEncoder.load(result.directory.path / "ranker")
    np.testing.assert_allclose(stored.references, student.encode(references, normalize=False), atol=1e-5)
    assert (stored.weight, stored.normalize, stored.rank_method) == (0.4, True, "sort")
    assert isinstance(result.evaluation, Evaluation)
    names = [model.name for model in result.evaluation.models]
    assert names[:3] == ["start", "student", "student + ranks"]
    (sts12, *_) = collect(labelled, ["sts"], []).tasks
    gold = sts12.pairs.gold  # type: ignore[attr-defined]
    scores = equation_7(student, references, sts12.pairs.first, sts12.pairs.second, 0.4)  # type: ignore[attr-defined]
    found = result.evaluation.score("sts", "STS12", "all", "student + ranks")
    assert found == pytest.approx(100 * spearmanr(scores, gold).statistic, abs=0.2)
    measured = {score.suite for score in result.evaluation.scores if "student + ranks" in score.values}
    assert measured == {"sts"}
    assert all("student" in score.values for score in result.evaluation.scores if score.suite != "sts")


def test_rank_inference_has_the_papers_settings() -> None:
    section = load_recipe("rankencoder-bert-base", ["evaluation.data=x", "evaluation.rank_inference={}"]).evaluation
    assert section.rank_inference is not None
    assert (section.rank_inference.weight, section.rank_inference.num_references) == (0.1, 100_000)


def test_mistakes_are_named(
    corpus: Path, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = tmp_path / "single.txt"
    single.write_text("One sentence.\n")
    cross = make_cross_encoder(tmp_path / "cross", tiny("bert"))
    cases = (
        (tiny("bert"), single, [], CorpusTooSmallError),
        (tiny("bert"), corpus, ["--weight", "2"], EncoderSettingError),
        (cross, corpus, [], UnsupportedModelError),
    )
    for model, file, options, error in cases:
        given = [str(model), "--corpus", str(file), "--out", str(tmp_path / "out"), "--pooling", "mean", *options]
        assert cli.main(["rank", *given]) == (2 if error is EncoderSettingError else 1)
        assert f"[{error.code}]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
