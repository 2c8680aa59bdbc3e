"""Disagreeing teachers: pair weights, weights per domain, and false negatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.data import Corpus
from distcse.errors import InvalidValueError, MissingColumnError, TeacherWeightError
from distcse.experiments.distillation.batch_loader import BatchLoader
from distcse.experiments.distillation.distillation_task import DistillationTask
from distcse.losses import disagreement_weights, info_nce, list_mle, list_net, mix_lists, negative_weights
from distcse.recipe import CorpusSection, Recipe, TeacherSection
from distcse.teachers.ensemble import LocalTeacherClient
from distcse.teachers.serving import serving
from distcse.teachers.teacher_weights import TeacherWeights
from tests.failures import fails_with
from tests.jobs import make_spec, train

MakeRecipe = Callable[..., Recipe]


def test_pair_weights_are_1_where_teachers_agree_up_to_scale() -> None:
    one = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(disagreement_weights(torch.stack([one, 0.5 * one + 0.3]), [1, 2], 0.5), torch.ones(3, 8))
    torch.testing.assert_close(disagreement_weights(one[None], [1], 0.5), torch.ones(3, 8))
    other = one.clone()
    other[1, 2] += 3.0
    weights = disagreement_weights(torch.stack([one, other]), [1, 1], 0.5)
    assert weights[1].argmin() == 2 and weights[1, 2] < 0.2 and (weights[0] == 1).all()
    assert (disagreement_weights(torch.zeros(2, 3, 8), [1, 1], 0.5) == 1).all()  # constant lists do not disagree


def test_a_teacher_with_weight_0_does_not_change_pair_weights() -> None:
    lists = torch.rand(2, 2, 8, generator=torch.Generator().manual_seed(0))
    weights = disagreement_weights(lists, torch.tensor([[1.0, 1.0], [0.0, 1.0]]), 0.5)
    assert (weights[0] == 1).all() and weights[1].min() < 0.9


def test_equal_pair_weights_change_no_loss() -> None:
    random = torch.Generator().manual_seed(1)
    similarities, lists = (torch.rand(4, 9, generator=random, dtype=torch.float64) for _ in range(2))
    ones = torch.ones(4, 9, dtype=torch.float64)
    for excluded in (True, False):
        torch.testing.assert_close(
            list_net(similarities, lists, 0.1, 0.05, exclude_positive=excluded, pair_weights=ones),
            list_net(similarities, lists, 0.1, 0.05, exclude_positive=excluded),
        )
        torch.testing.assert_close(
            list_mle(similarities, lists, 0.1, exclude_positive=excluded, pair_weights=ones),
            list_mle(similarities, lists, 0.1, exclude_positive=excluded),
        )


def test_the_minimum_is_the_teachers_list_for_any_pair_weights() -> None:
    random = torch.Generator().manual_seed(2)
    lists = torch.rand(3, 7, generator=random, dtype=torch.float64)
    weights = torch.rand(3, 7, generator=random, dtype=torch.float64) + 0.1
    at = lists.clone().requires_grad_()
    list_net(at, lists, 0.1, 0.1, exclude_positive=False, pair_weights=weights).sum().backward()
    torch.testing.assert_close(at.grad, torch.zeros_like(lists), atol=1e-12, rtol=0)
    away = (lists + 0.05 * torch.randn(3, 7, generator=random, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: list_net(s, lists, 0.1, 0.1, pair_weights=weights), (away,))
    assert torch.autograd.gradcheck(lambda s: list_mle(s, lists, 0.1, pair_weights=weights), (away,))


def test_weights_of_false_negatives() -> None:
    lists = torch.tensor([[0.2, 1.0, 0.95, 0.8], [0.1, 0.99, 1.0, 0.9]])
    mask = negative_weights(lists, 0.9, "mask", offset=1)
    assert mask.tolist() == [[1, 1, 0, 1], [1, 0, 1, 0]]
    soft = negative_weights(lists, 0.9, "soften", offset=1)
    torch.testing.assert_close(soft, torch.tensor([[1, 1, 0.5, 1], [1, 0.1, 1, 1.0]]), atol=1e-5, rtol=0)
    similarities = torch.tensor([[0.1, 0.9, 0.8, 0.3], [0.2, 0.5, 0.7, 0.6]], dtype=torch.float64)
    terms = [math.exp(s / 0.1) for s in (0.1, 0.9, 0.3)]
    found = info_nce(similarities, 0.1, 1, mask)
    assert float(found[0]) == pytest.approx(-math.log(terms[1] / sum(terms)), abs=1e-12)
    at = similarities.clone().requires_grad_()
    info_nce(at, 0.1, 1, mask).sum().backward()
    assert at.grad is not None and float(at.grad[0, 2]) < 1e-300 and at.grad.isfinite().all()


def test_weights_by_row() -> None:
    lists = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(3))
    weights = torch.tensor([[1.0, 0.0, 3.0], [1.0, 2.0, 1.0]])
    mixed = mix_lists(lists, weights)
    for row, (one, other) in enumerate(weights.T.tolist()):
        torch.testing.assert_close(mixed[row], mix_lists(lists, [one, other])[row])


def domains_of(tmp_path: Path, name: str = "d.jsonl") -> Corpus:
    lines = [f'{{"text": "{text}", "kind": {kind}}}' for text, kind in ROWS]
    (tmp_path / name).write_text("\n".join(lines))
    section = CorpusSection(path=str(tmp_path / name), domain="kind")
    return Corpus.prepare(section, tmp_path / "cache")


ROWS = [("One.", '"legal"'), ("  ", '"legal"'), ("Two.", '"news"'), ("Three.", "null"), ("Four.", '"legal"')]


def test_domains_of_a_corpus(tmp_path: Path) -> None:
    for corpus in (domains_of(tmp_path), domains_of(tmp_path)):
        assert corpus.texts(range(4)) == ["One.", "Two.", "Three.", "Four."]
        assert corpus.domains == ["legal", "news", ""]
        assert corpus.domain_ids(np.arange(4)).tolist() == [0, 1, 2, 0]
    assert corpus.reused and corpus.content != corpus.fingerprint
    (tmp_path / "p.csv").write_text("text,kind\nOne.,legal\nTwo.,news\n")
    cut = Corpus.prepare(CorpusSection(path=str(tmp_path / "p.csv"), domain="kind", limit=1), tmp_path / "cache")
    assert cut.domains == ["legal"] and len(cut) == 1
    (tmp_path / "t.txt").write_text("One.\n")
    with fails_with(MissingColumnError, "corpus.domain", "kind", "t.txt"):
        Corpus.prepare(CorpusSection(path=str(tmp_path / "t.txt"), domain="kind"), tmp_path / "cache")
    (tmp_path / "blank.csv").write_text("text,kind\nThree.,\n")
    both = CorpusSection(path=[str(tmp_path / "blank.csv"), str(tmp_path / "p.csv")], domain="kind")
    assert Corpus.prepare(both, tmp_path / "cache").domains == ["", "legal", "news"]
    (tmp_path / "swapped.csv").write_text("text,kind\nOne.,news\nTwo.,legal\n")
    original, swapped = (
        Corpus.prepare(CorpusSection(path=str(tmp_path / file), domain="kind"), tmp_path / "cache")
        for file in ("p.csv", "swapped.csv")
    )
    assert original.fingerprint == swapped.fingerprint and original.content != swapped.content
    with fails_with(MissingColumnError, "'sort'", "p.csv"):
        Corpus.prepare(CorpusSection(path=str(tmp_path / "p.csv"), domain="sort"), tmp_path / "cache")
    plain = Corpus.prepare(CorpusSection(path=str(tmp_path / "p.csv")), tmp_path / "cache")
    assert plain.domains == [] and plain.content == plain.fingerprint


def test_alphas_by_domain(tmp_path: Path) -> None:
    corpus = domains_of(tmp_path)
    teachers = [
        TeacherSection(backbone="a", alpha=2.0, alpha_by_domain={"legal": 0.0}),
        TeacherSection(backbone="b", alpha_by_domain={"news": 5.0}),
    ]
    found = TeacherWeights(teachers, corpus).of(np.array([1, 0, 2]))
    assert isinstance(found, torch.Tensor) and found.tolist() == [[2, 0, 2], [5, 1, 1]]
    assert TeacherWeights([TeacherSection(backbone="a", alpha=3.0)], corpus).of(np.array([0])) == [3.0]
    with fails_with(TeacherWeightError, "alpha_by_domain", "'sport'", ": , legal, news"):
        TeacherWeights([TeacherSection(backbone="a", alpha_by_domain={"sport": 1.0})], corpus)
    with fails_with(TeacherWeightError, "domain 'news'", "alpha_by_domain"):
        TeacherWeights([TeacherSection(backbone="a", alpha_by_domain={"news": 0.0})], corpus)
    (tmp_path / "t.txt").write_text("One.\n")
    plain = Corpus.prepare(CorpusSection(path=str(tmp_path / "t.txt")), tmp_path / "cache")
    with fails_with(TeacherWeightError, "alpha_by_domain", "corpus.domain: COLUMN"):
        TeacherWeights(teachers, plain)


def test_a_run_with_disagreement_domains_and_false_negatives(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    recipe_with()
    lines = (tmp_path / "corpus.txt").read_text().splitlines()
    (tmp_path / "corpus.csv").write_text(
        "text,kind\n" + "".join(f'"{line}",{"legal" if row % 3 else "news"}\n' for row, line in enumerate(lines))
    )
    recipe = recipe_with(
        f"corpus.path={tmp_path / 'corpus.csv'}",
        "corpus.domain=kind",
        "teachers.disagreement_scale=0.5",
        "teachers.encoders.0.alpha_by_domain={legal: 0.0, news: 1.0}",
        "objective.info_nce.false_negatives={threshold: 0.5, form: soften}",
    )
    spec, tables = make_spec(recipe)
    loader = BatchLoader(spec, 0, 1)
    clients = [
        LocalTeacherClient(serving(teacher, table))
        for teacher, table in zip(recipe.teachers.encoders, tables, strict=True)
    ]
    task = DistillationTask(spec, loader, clients)
    task.on_start(0)
    outputs = task.teacher_outputs(0, torch.device("cpu"))
    batch = loader.sampler.batch(0)
    legal = loader.corpus.domain_ids(batch) == loader.corpus.domains.index("legal")
    units = [table.vectors(batch) for table in tables]
    first, second = (unit @ unit.T for unit in units)
    expected = np.where(legal[:, None], second, (first + 2 * second) / 3)
    assert outputs.similarities is not None and outputs.pair_weights is not None and 0 < legal.sum() < len(batch)
    np.testing.assert_allclose(outputs.similarities.numpy(), expected, atol=1e-6)
    assert float(outputs.pair_weights.min()) < 0.9
    assert train(spec, tables).state.finished


@pytest.mark.parametrize("tau1", [1e-4, 1e-3, 0.05])
def test_a_masked_negative_has_no_effect_at_any_temperature(tau1: float) -> None:
    """Even if it is more similar to the row than the positive."""
    similarities = torch.tensor([[0.9, 0.99, 0.1]])
    mask = negative_weights(torch.tensor([[1.0, 0.95, 0.2]]), 0.9, "mask")
    without = info_nce(similarities[:, [0, 2]], tau1)
    assert torch.equal(info_nce(similarities, tau1, weights=mask), without)


def test_keys_that_need_teachers_or_columns_are_refused_without_them(recipe_with: MakeRecipe) -> None:
    with fails_with(InvalidValueError, "objective.info_nce.false_negatives", "teachers"):
        recipe_with("objective.info_nce.false_negatives={}", "teachers.encoders=[]", "objective.rank=null")
    joined = ("objective.regression={}", "student.projection=none", "teachers.encoders.0.alpha_by_domain={legal: 2.0}")
    with fails_with(InvalidValueError, "objective.regression", "alpha_by_domain"):
        recipe_with(*joined)
    assert recipe_with(*joined, "objective.regression.teachers=[0]")
    zero_weight = "teachers.encoders.0.alpha_by_domain={legal: 2.0, news: 0.0}"
    with fails_with(InvalidValueError, "alpha_by_domain", " news", "objective.regression.teachers"):
        recipe_with(*joined[:2], zero_weight, "objective.regression.teachers=[0]")
    assert recipe_with(*joined[:2], zero_weight, "objective.regression.teachers=[1]")


def test_settings_without_effect_are_refused(recipe_with: MakeRecipe) -> None:
    only = "teachers.encoders=[{backbone: a}]"
    vectors = ("objective={regression: {}, rank: null, info_nce: null, consistency: null}", "student.projection=none")
    for overrides, named in (
        (("teachers.disagreement_scale=0.5", only), ("teachers.disagreement_scale", "one teacher")),
        (("teachers.disagreement_scale=0.5", *vectors), ("teachers.disagreement_scale", "no objective.rank")),
        (("teachers.rank_noise_group=4", *vectors), ("teachers.rank_noise_group",)),
        (
            ("training.neighbor_batching={per_anchor: 17}",),
            ("per_anchor", "17", "min_rank", "max_rank", "16"),
        ),
    ):
        with fails_with(InvalidValueError, *named):
            recipe_with(*overrides)
    assert recipe_with("teachers.disagreement_scale=0.5", "objective.rank.gamma=0", "teachers.rank_noise_group=4")
    assert recipe_with("training.neighbor_batching={per_anchor: 16}")


def test_rank_noise_does_not_change_false_negatives(recipe_with: MakeRecipe) -> None:
    """The rank term gets shuffled lists; false negatives are found in the clean ones."""
    spec, tables = make_spec(recipe_with("teachers.rank_noise_group=4", "objective.rank.queue={num_batches: 30}"))
    loader = BatchLoader(spec, 0, 1)
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    task = DistillationTask(spec, loader, [LocalTeacherClient(serving(teacher, table)) for teacher, table in teachers])
    task.on_start(loader.sampler.steps_per_epoch - 1)
    outputs = task.teacher_outputs(loader.sampler.steps_per_epoch - 1, torch.device("cpu"))
    mask = loader.duplicate_mask(loader.sampler.steps_per_epoch - 1)
    assert (
        mask is not None and mask.any() and outputs.similarities is not None and outputs.clean_similarities is not None
    )
    assert not torch.equal(outputs.similarities, outputs.clean_similarities)
    is_duplicate = torch.from_numpy(mask)
    assert torch.equal(outputs.similarities[:, 16:][is_duplicate], outputs.clean_similarities[:, 16:][is_duplicate])
    itself = torch.cat([torch.eye(16, dtype=torch.bool), is_duplicate], dim=1)
    assert outputs.clean_similarities[itself].min() > 0.999 > outputs.similarities[~itself].max()
