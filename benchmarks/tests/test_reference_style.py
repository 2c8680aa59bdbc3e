"""The reference style computes what distcse computes: only then is a ratio of their times one of speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from benchmarks.material import list_recipe, live_sources, prepared
from benchmarks.pairs import OurPairStep, reference_diffcse
from benchmarks.rank_encoder import OBJECTIVE, reference_of
from benchmarks.reference_style import (
    ContrastiveLoop,
    FrozenTeacher,
    PairLoop,
    broadcast_cosine,
    list_mle,
    pairwise_spearman,
    rank_similarities,
    rankcse,
    rankcse_loss,
    score_bi,
    score_cross,
)
from benchmarks.step import RANKCSE, equal_or_stop, load
from distcse.evaluation import PairScores, VectorModel
from distcse.losses import TeacherOutputs, build_objective, gather_views
from distcse.losses import list_mle as ours_list_mle
from distcse.models import CrossEncoder, Encoder
from distcse.rank_space import RankSpace
from distcse.recipe import LoopSection, ObjectiveSection
from distcse.text import Corpus
from tests.models import make_masked_lm
from tests.pairs import bi_tokens, cross_tokens, make_pairs
from tests.training_step import TrainingStep


@pytest.fixture
def spec(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Callable[..., Any]:
    """Makes a prepared job of tiny models over the fixture's sentences."""
    file = tmp_path / "text.txt"
    file.write_text("\n".join(sentences) + "\n", encoding="utf-8")

    def make(objective: dict[str, Any], teachers: list[dict[str, Any]], **others: Any) -> Any:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        return prepared(list_recipe(place, file, str(tiny("bert")), teachers, objective, 12, 60, **others))

    return make


def reference_rankcse(step: TrainingStep, teachers: list[dict[str, Any]], student: Path) -> ContrastiveLoop:
    frozen = [FrozenTeacher(load(t["backbone"]).eval(), t["pooling"], t["alpha"]) for t in teachers]
    backbone = load(str(student))
    backbone.pooler.requires_grad_(False)  # type: ignore[union-attr, operator]
    return ContrastiveLoop(backbone, step.task.model.projection, step.tokens, rankcse(frozen, 0.05, 0.05, 0.025))


def test_rankcse_step_of_live_teachers(spec: Callable[..., Any], tiny: Callable[..., Path]) -> None:
    teachers = [
        {"backbone": str(tiny("bert")), "pooling": "mean", "max_length": 32, "alpha": 1.0},
        {"backbone": str(tiny("bert")), "pooling": "cls", "max_length": 32, "alpha": 2.0},
    ]
    made, _ = spec(RANKCSE, teachers)
    ours = TrainingStep(made, live_sources(made, Corpus.open(made.corpus)))
    theirs = reference_rankcse(ours, teachers, tiny("bert"))
    equal_or_stop(ours, theirs)
    with torch.no_grad():
        next(theirs.backbone.parameters()).mul_(1.01)
    with pytest.raises(SystemExit, match="do not compute the same"):
        equal_or_stop(ours, theirs)


def test_rankcse_loss_of_two_different_views() -> None:
    z1, z2 = (torch.randn(9, 16, dtype=torch.float64) for _ in range(2))
    lists = torch.rand(9, 9, dtype=torch.float64)
    section = ObjectiveSection.model_validate(RANKCSE)
    loss, _ = build_objective(section)(gather_views(z1, z2), TeacherOutputs(lists))
    torch.testing.assert_close(rankcse_loss(z1, z2, lists, 0.05, 0.05, 0.025), loss, rtol=1e-9, atol=0)
    cosines = broadcast_cosine(z1, z2)
    torch.testing.assert_close(cosines, gather_views(z1, z2).similarities)
    torch.testing.assert_close(list_mle(cosines, lists, 0.05), ours_list_mle(cosines, lists, 0.05).mean())


def test_rankencoder_step(spec: Callable[..., Any], tiny: Callable[..., Path]) -> None:
    teacher = {"backbone": str(tiny("bert")), "pooling": "cls", "max_length": 32, "similarity": "rank"}
    references = torch.nn.functional.normalize(torch.randn(50, 32), dim=1).numpy()
    made, _ = spec(OBJECTIVE, [teacher])
    reference_of(made, str(tiny("bert")), references)  # stops where it differs


def test_ranks_of_either_style_are_spearmans() -> None:
    vectors, references = np.random.default_rng(0).standard_normal((2, 40, 8), dtype=np.float32)
    similarities = vectors[:6] @ references.T
    expected = spearmanr(similarities.T).statistic
    np.testing.assert_allclose(rank_similarities(torch.from_numpy(similarities)).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(RankSpace(references).similarities(vectors[:6]), expected, atol=1e-6)
    np.testing.assert_allclose(pairwise_spearman(similarities[:3], similarities[3:]), np.diag(expected[:3, 3:]))


def test_diffcse_step_with_the_same_masks(spec: Callable[..., Any], tiny: Callable[..., Path], tmp_path: Path) -> None:
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    detection = {"weight": 0.005, "generator": str(generator), "masking_ratio": 0.3, "generator_dropout": False}
    objective = {"tau1": 0.05, "consistency": None, "rank": None, "detection": detection}
    made, _ = spec(objective, [], student={"projection": "batch_norm_mlp"})
    theirs = reference_diffcse(TrainingStep(made, []), str(generator), str(tiny("bert")))  # stops where it differs
    assert torch.isfinite(theirs())


def test_pair_steps_and_scores(tiny: Callable[..., Path], sentences: list[str], tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    pairs = make_pairs(tmp_path, sentences[:40], sentences[40:80])
    bi, cross = Encoder.load(tiny("bert"), pooling="mean", max_length=32), CrossEncoder.fresh(tiny("bert"), 64)
    sentence_tokens, pair_tokens = bi_tokens(bi, pairs), cross_tokens(cross, pairs, both_orders=False)
    section = LoopSection(batch_size=16, engine="torch", precision="fp32")
    model = AutoModelForSequenceClassification.from_pretrained(tiny("bert"), num_labels=1)
    model.load_state_dict(cross.model.state_dict())
    for ours, theirs, is_cross in (
        (OurPairStep(bi, sentence_tokens, section), load(str(tiny("bert"))), False),
        (OurPairStep(cross, pair_tokens, section), model, True),
    ):
        places = ours.task.rank_rows(0)
        labels = torch.from_numpy(ours.task.labels[places])
        if is_cross:
            read, _ = pair_tokens.texts(places)
            batch = read, [np.zeros_like(row) for row in read], labels  # this tokenizer tells no sides apart
        else:
            both, _ = sentence_tokens.texts(places)
            sides = both[: len(places)], both[len(places) :]
            batch = (*sides, labels)
        loop = PairLoop(theirs, lambda step, batch=batch: batch, is_cross)  # type: ignore[misc]
        ours.task.model.eval()
        loop.model.eval()
        assert loop.loss().item() == pytest.approx(ours.loss().item(), rel=1e-5)
    tokenizer, sentences_of_pairs = AutoTokenizer.from_pretrained(tiny("bert")), list(pairs.both())
    found = VectorModel.of(bi).similarities(*pairs.texts(0, len(pairs)))
    np.testing.assert_allclose(score_bi(load(str(tiny("bert"))), tokenizer, sentences_of_pairs), found, atol=1e-5)
    scores = PairScores(cross).similarities(*pairs.texts(0, len(pairs)))
    np.testing.assert_allclose(score_cross(model, tokenizer, sentences_of_pairs), scores, atol=1e-5)
