"""Each measure, compared with values by hand, the oracles, scipy and scikit-learn; and the paired bootstrap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau, rankdata, spearmanr
from sklearn.metrics import ndcg_score, roc_auc_score

from distcse.errors import EvaluationDataError, EvaluationFormatError, ModelOutputError
from distcse.evaluation import (
    CustomSet,
    RetrievalDataset,
    RetrievalTask,
    ScoredPairs,
    StsTask,
    VectorModel,
    agreement_result,
    bootstrap,
    collect,
    sts_score,
)
from distcse.evaluation.bootstrap import (
    AucOf,
    AverageOf,
    Fixed,
    MeanOf,
    SpearmanOf,
    difference,
    ratio,
    resample,
    weighted_ranks,
)
from distcse.evaluation.tasks.geometry import GeometryTask, alignment, uniformity
from distcse.evaluation.tasks.pairs import PairClassificationTask
from distcse.evaluation.tasks.ranking import RankingTask, kendall, ndcg, ranked_lists
from tests.failures import fails_with


def unit(vectors: np.ndarray) -> np.ndarray:
    result: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return result


def pairs_of(rows: list[tuple[str, str, float]], subsets: list[str] | None = None) -> ScoredPairs:
    first, second, gold = ([row[column] for row in rows] for column in range(3))
    return ScoredPairs("set", first, second, np.array(gold, dtype=float), np.array(subsets or [""] * len(rows)))


class FixedScores:
    """A pair model with given scores."""

    def __init__(self, scores: dict[tuple[str, str], float]) -> None:
        self._scores = scores

    def similarities(self, first: Any, second: Any) -> np.ndarray:
        return np.array([self._scores[pair] for pair in zip(first, second, strict=True)])


def fixed_vectors(vectors: Mapping[str, Sequence[float]]) -> VectorModel:
    return VectorModel(lambda texts: np.array([vectors[text] for text in texts], dtype=np.float32))


def letters(texts: Any) -> np.ndarray:
    """Encode a text as its counts of the letters a to d."""
    return np.array([[text.count(letter) for letter in "abcd"] for text in texts], dtype=np.float32)


def agreement(student: np.ndarray, similarities: np.ndarray) -> float:
    return agreement_result(student, similarities).scores["agreement"].value


def test_agreement_is_the_mean_of_scipys_correlations() -> None:
    generator = np.random.default_rng(0)
    student, teacher = unit(generator.normal(size=(12, 4))), unit(generator.normal(size=(12, 6)))
    ours, theirs = student @ student.T, teacher @ teacher.T
    rows = [spearmanr(np.delete(ours[i], i), np.delete(theirs[i], i)).statistic for i in range(12)]
    assert agreement(student, theirs) == pytest.approx(100 * np.mean(rows), abs=1e-9)
    assert agreement(teacher, theirs) == pytest.approx(100)
    assert agreement(np.ones((12, 1)), theirs) == 0


def test_sts_aggregates_equal_the_oracle(oracles: dict[str, Any]) -> None:
    inputs, expected = (oracles["sts_all_aggregation"][key] for key in ("inputs", "expected"))
    cosines, gold = inputs["cos_a"] + inputs["cos_b"], inputs["gold_a"] + inputs["gold_b"]
    names = [(f"first {n}", f"second {n}") for n in range(len(gold))]
    subsets = ["a"] * len(inputs["gold_a"]) + ["b"] * len(inputs["gold_b"])
    pairs = pairs_of([(*name, score) for name, score in zip(names, gold, strict=True)], subsets)
    model = FixedScores(dict(zip(names, cosines, strict=True)))
    for chosen in ("all", "mean", "wmean"):
        result = StsTask(pairs, chosen).measure(model)
        assert next(iter(result.scores)) == chosen
        for aggregate, value in expected.items():
            assert result.scores[aggregate].value == pytest.approx(100 * value, abs=1e-4)
    assert {name: count for name, (count, _) in result.details["subsets"].items()} == {"a": 6, "b": 9}


def test_a_vector_model_encodes_each_sentence_once() -> None:
    encoded: list[str] = []

    def encode(texts: Any) -> np.ndarray:
        encoded.extend(texts)
        return letters(texts)

    model, pairs = VectorModel(encode), pairs_of([("a", "ab", 3), ("a", "b", 1), ("ab", "abb", 2)])
    assert sts_score(model, pairs) == pytest.approx(100 * spearmanr([0.5**0.5, 0, 0.9487], [3, 1, 2]).statistic)
    sts_score(model, pairs)
    assert sorted(encoded) == ["a", "ab", "abb", "b"]
    assert model.similarities(["x"], ["a"]).tolist() == [0]  # a zero vector, like SentEval's nan_to_num
    assert sts_score(VectorModel(lambda texts: np.ones((len(texts), 3))), pairs) == 0, "a collapsed model"
    with fails_with(ModelOutputError, "4 of 4 texts"):
        sts_score(VectorModel(lambda texts: np.full((len(texts), 3), np.nan)), pairs)


def test_pair_classification_equals_scikit_learns_auc() -> None:
    labels, scores = np.array([0, 1, 1, 0, 1]), np.array([0.3, 0.3, 0.9, 0.1, 0.2])
    names = [f"s{n}" for n in range(5)]
    task = PairClassificationTask("set", names, names, labels)
    result = task.measure(FixedScores({(n, n): s for n, s in zip(names, scores, strict=True)}))
    assert result.scores["auc"].value == pytest.approx(100 * roc_auc_score(labels, scores))


def test_ranking_scores_equal_the_oracle(oracles: dict[str, Any]) -> None:
    case = oracles["kcc_ndcg_table1"]
    gold = np.array(case["inputs"]["gold"])
    for system in ("simcse", "rankcse"):
        similarities = np.array(case["inputs"][system])
        assert kendall(similarities, gold) == pytest.approx(case["expected"][f"kcc_{system}"], abs=1e-6)
        assert ndcg(similarities, gold) == pytest.approx(case["expected"][f"ndcg_lin_{system}"], abs=1e-6)
    rows = [("query", f"partner {n}", score) for n, score in enumerate(gold)]
    scores = {("query", f"partner {n}"): s for n, s in enumerate(case["inputs"]["simcse"])}
    result = RankingTask(pairs_of(rows)).measure(FixedScores(scores))
    assert result.details == {"lists": 1}
    assert result.scores["kcc"].value == pytest.approx(40) and result.scores["ndcg"].value == pytest.approx(94.5488)


def test_lists_are_from_either_column_and_need_four_partners() -> None:
    rows = [("q", "a", 1.0), ("b", "q", 2.0), ("q", "c", 3.0), ("d", "q", 4.0), ("q", "a", 3.0), ("q", "q", 5.0)]
    rows += [("few", "a", 1.0), ("few", "b", 2.0), ("few", "c", 3.0)]
    rows += [("flat", p, 2.0) for p in ("w", "x", "y", "z")]
    (found,) = ranked_lists(pairs_of(rows))  # `flat` is constant, `few` has three partners
    assert found.query == "q" and found.candidates == ["a", "b", "c", "d"]
    assert found.gold.tolist() == [2, 2, 3, 4], "of a repeated pair the mean"
    similarities = np.array([0.1, 0.2, 0.2, 0.9])
    assert kendall(similarities, found.gold) == pytest.approx(kendalltau(similarities, found.gold).statistic)
    assert ndcg(similarities, found.gold) == pytest.approx(ndcg_score([found.gold], [similarities]))
    assert kendall(np.ones(4), found.gold) == 0


def test_alignment_and_uniformity_equal_the_oracle(oracles: dict[str, Any]) -> None:
    case = oracles["align_uniform"]
    z1, z2 = (unit(np.array(case["inputs"][name])) for name in ("z1", "z2"))
    assert alignment(z1, z2).mean() == pytest.approx(case["expected"]["align"], abs=1e-6)
    assert uniformity(np.concatenate([z1, z2])) == pytest.approx(case["expected"]["uniform_pdist"], abs=1e-6)


def test_geometry_selects_pairs_by_gold_score() -> None:
    rows = [("a", "ab", 5.0), ("b", "bbc", 4.0), ("c", "cccd", 3.4), ("d", "da", 0.0), ("ac", "bd", 2.9)]
    pairs, model = pairs_of(rows), VectorModel(letters)
    result = GeometryTask(pairs).measure(model)
    a, ab = model.unit_vectors(["a", "ab"])
    assert result.scores["alignment"].value == pytest.approx(((a - ab) ** 2).sum(), abs=1e-6)  # only pairs above 4
    assert result.scores["uniformity"].value == pytest.approx(uniformity(model.unit_vectors(pairs.unique)))
    similar = model.similarities(pairs.first[:3], pairs.second[:3])
    assert result.scores["similar"].value == pytest.approx(100 * spearmanr(similar, pairs.gold[:3]).statistic)


def test_retrieval_by_hand() -> None:
    documents = ["d0", "d1", "d2", "d3"]
    vectors = dict(zip(documents, np.eye(4).tolist(), strict=True))
    vectors |= {"q0": [1, 0, 0, 0], "q1": [0.9, 1, 0, 0], "q2": [1, 0.9, 0.8, 0], "q3": [1, 1, 1, 0.0]}
    relevant: list[dict[int, float]] = [{n: 1.0} for n in range(4)]
    dataset = RetrievalDataset(["q0", "q1", "q2", "q3"], documents, relevant, [None] * 4)
    scores = RetrievalTask("set", dataset).measure(fixed_vectors(vectors)).scores
    # Ranks 1, 1, 3, and 4 for q3, whose cosine with d3 is 0.
    assert scores["recall@1"].value == 50 and scores["recall@5"].value == 100
    assert scores["mrr@10"].value == pytest.approx(100 * (1 + 1 + 1 / 3 + 1 / 4) / 4)
    assert scores["ndcg@10"].value == pytest.approx(100 * (1 + 1 + 1 / 2 + 1 / np.log2(5)) / 4)
    tied = VectorModel(lambda texts: np.ones((len(texts), 2), dtype=np.float32))
    assert RetrievalTask("set", dataset).measure(tied).scores["recall@1"].value == 0  # ties rank last


def test_retrieval_with_several_graded_documents() -> None:
    model = fixed_vectors({"q": [1.0, 0], "best": [1, 0.1], "good": [1, 0.5], "irrelevant": [1, 0.2], "far": [0, 1]})
    dataset = RetrievalDataset(["q"], ["best", "good", "irrelevant", "far"], [{0: 2.0, 1: 1.0}], [None])
    scores = RetrievalTask("set", dataset).measure(model).scores
    assert scores["recall@1"].value == 50 and scores["recall@5"].value == 100
    gold, cosines = np.array([[2.0, 1, 0, 0]]), np.array([[0.99, 0.89, 0.98, 0]])
    assert scores["ndcg@10"].value == pytest.approx(100 * ndcg_score(gold, cosines, k=10), abs=1e-4)


def test_paraphrases_are_queries_in_both_directions() -> None:
    pairs = pairs_of([("a", "ab", 5.0), ("b", "c", 4.9), ("d", "d", 5.0), ("ac", "a", 5.0)])
    dataset = RetrievalDataset.paraphrases(pairs)
    assert dataset.queries == ["a", "ac", "ab", "a"]
    assert [dataset.documents[next(iter(gains))] for gains in dataset.relevant] == ["ab", "a", "a", "ac"]
    assert [dataset.documents[index] for index in dataset.excluded if index is not None] == dataset.queries
    with fails_with(EvaluationFormatError, "set", "5"):
        RetrievalDataset.paraphrases(pairs_of([("a", "b", 1.0)]))


SEARCH = {
    "queries.tsv": "id\ttext\nq1\tfirst\nd1\tsame id\n",
    "corpus.jsonl": '{"_id": "d1", "title": "T", "text": "x"}\n{"_id": "d2", "title": "", "text": "y"}\n',
    "relevant.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nd1\td2\t1\n",
}


def write_search(folder: Path, added: Mapping[str, str]) -> None:
    for name, text in SEARCH.items():
        (folder / name).write_text(text + added.get(name, ""))


def test_custom_retrieval_datasets_are_read(tmp_path: Path) -> None:
    write_search(tmp_path, {})
    dataset = RetrievalDataset.read(tmp_path)
    assert dataset == RetrievalDataset(["first", "same id"], ["T x", "y"], [{0: 2.0}, {1: 1.0}], [None, 0])
    assert dataset.warnings == ()
    (tmp_path / "relevant.tsv").unlink()
    with fails_with(EvaluationDataError, "relevant.tsv", ".tsv.gz"):
        RetrievalDataset.read(tmp_path)


@pytest.mark.parametrize(
    ("file", "row", "named"),
    [
        ("relevant.tsv", "q9\td1\t1", ("relevant.tsv, line 5", "'q9'", "queries.tsv")),
        ("relevant.tsv", "q1\td9\t1", ("relevant.tsv, line 5", "'d9'", "corpus.jsonl")),
        ("relevant.tsv", "q1\td1\t1", ("relevant.tsv, line 5", "'q1' and 'd1'", "score 1 here and 2 above")),
        ("relevant.tsv", "q1\td1\thigh", ("relevant.tsv, line 5, column 'score'", "'high'")),
        ("queries.tsv", "q1\tagain", ("queries.tsv, line 4", "'q1' is repeated")),
        ("queries.tsv", "q2\t ", ("queries.tsv, line 4", "the query is empty")),
        ("corpus.jsonl", '{"_id": "d2", "title": "", "text": "z"}', ("corpus.jsonl, line 3", "'d2' is repeated")),
        ("corpus.jsonl", '{"_id": "", "title": "", "text": "z"}', ("corpus.jsonl, line 3, column '_id'",)),
    ],
)
def test_rows_of_retrieval_sets_that_cannot_be_meant_are_refused(
    file: str, row: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    write_search(tmp_path, {file: f"{row}\n"})
    with fails_with(EvaluationFormatError, *named):
        RetrievalDataset.read(tmp_path)


@pytest.mark.parametrize(
    ("file", "rows", "warned"),
    [
        (
            "queries.tsv",
            "q2\tb\nq3\tc\n",
            "queries.tsv, line 4 (first of 2 rows): the query has no relevant document in",
        ),
        ("relevant.tsv", "d1\td2\t1\n", "relevant.tsv, line 5: the row equals an earlier one and counts once"),
        ("relevant.tsv", "d1\td1\t-1\n", "relevant.tsv, line 5: the score is below 0 and counts as 0"),
        ("corpus.jsonl", '{"_id": "d3", "title": "", "text": " "}\n', "corpus.jsonl, line 3: the document has no text"),
    ],
)
def test_rows_of_retrieval_sets_without_effect_are_a_warning(file: str, rows: str, warned: str, tmp_path: Path) -> None:
    write_search(tmp_path, {file: rows, "corpus.jsonl": '{"_id": "d4", "title": "only", "text": ""}\n'} | {file: rows})
    dataset = RetrievalDataset.read(tmp_path)
    assert (dataset.queries, dataset.relevant) == (["first", "same id"], [{0: 2.0}, {1: 1.0}])
    assert dataset.documents[2:] == (["."] if file == "corpus.jsonl" else ["only"])
    (line,) = collect(None, [], [CustomSet.parse(f"retrieval={tmp_path}")]).warnings
    assert line.startswith(f"{tmp_path}/{warned}")


generator = np.random.default_rng(0)
GOLD = generator.integers(0, 6, 60).astype(float)
GOOD = GOLD + generator.normal(size=60)
BAD = GOLD + 4 * generator.normal(size=60)


def drawn(items: str, count: int, number: int) -> np.ndarray:
    """Return the indices that a row of weights represents."""
    weights: list[np.ndarray] = []
    resample(items, count, lambda block: (weights.append(block), np.zeros(len(block)))[1])
    return np.repeat(np.arange(count), np.concatenate(weights)[number].astype(int))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=20), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_weighted_ranks_equal_scipys_ranks_of_copies(values: list[int], seed: int) -> None:
    weights = np.random.default_rng(seed).integers(0, 3, (1, len(values))).astype(float)
    ranks = weighted_ranks(np.array(values, dtype=float), weights)[0]
    copies = np.repeat(np.arange(len(values)), weights[0].astype(int))
    np.testing.assert_allclose(ranks[copies], rankdata(np.array(values)[copies]))


def test_resampled_scores_equal_scipy_and_scikit_learn() -> None:
    labels = (GOLD > 2).astype(np.int64)
    spearman, auc, mean = SpearmanOf(GOOD, GOLD, "x"), AucOf(GOOD, labels, "x"), MeanOf(GOOD, "x", scale=1)
    assert spearman.value == pytest.approx(100 * spearmanr(GOOD, GOLD).statistic)
    assert auc.value == pytest.approx(100 * roc_auc_score(labels, GOOD))
    for number in (0, 1, 999):
        rows = drawn("x", 60, number)
        assert spearman.resampled[number] == pytest.approx(100 * spearmanr(GOOD[rows], GOLD[rows]).statistic)
        assert auc.resampled[number] == pytest.approx(100 * roc_auc_score(labels[rows], GOOD[rows]))
        assert mean.resampled[number] == pytest.approx(GOOD[rows].mean())


def test_resampling_in_blocks_changes_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, block_sizes = (GOLD > 2).astype(np.int64), []

    def scores() -> list[np.ndarray]:
        return [each.resampled for each in (SpearmanOf(GOOD, GOLD, "x"), AucOf(GOOD, labels, "x"), MeanOf(GOOD, "x"))]

    in_one_block = scores()
    monkeypatch.setattr(bootstrap, "WEIGHTS_PER_BLOCK", 7 * 60 + 1)
    resample("x", 60, lambda block: (block_sizes.append(len(block)), np.zeros(len(block)))[1])
    assert set(block_sizes) == {7, 1000 % 7} and sum(block_sizes) == 1000
    for expected, found in zip(in_one_block, scores(), strict=True):
        np.testing.assert_allclose(expected, found, rtol=1e-12)


def test_difference_is_paired_and_deterministic() -> None:
    good, bad = SpearmanOf(GOOD, GOLD, "x"), SpearmanOf(BAD, GOLD, "x")
    gap, reverse = difference(good, bad), difference(bad, good)
    assert gap is not None and reverse is not None
    assert gap.value == pytest.approx(good.value - bad.value)
    assert gap.low < gap.value < gap.high and gap.is_significant
    assert (gap.low, gap.high) == pytest.approx(np.percentile(good.resampled - bad.resampled, [2.5, 97.5]))
    assert (reverse.low, reverse.high) == pytest.approx((-gap.high, -gap.low))
    assert difference(SpearmanOf(GOOD, GOLD, "x"), SpearmanOf(BAD, GOLD, "x")) == gap
    same = difference(good, SpearmanOf(3 * GOOD + 1, GOLD, "x"))
    assert same is not None and (same.value, same.low, same.high) == (0, 0, 0) and not same.is_significant


def test_a_ratio_is_paired_and_needs_a_score_above_0() -> None:
    good, bad = (SpearmanOf(values, GOLD, "x") for values in (GOOD, BAD))
    found = ratio(bad, good)
    assert found is not None and found.value == pytest.approx(100 * bad.value / good.value)
    low, high = np.percentile([100 * a / b for a, b in zip(bad.resampled, good.resampled, strict=True)], [2.5, 97.5])
    assert (found.low, found.high) == pytest.approx((low, high)) and low < found.value < high
    assert ratio(good, SpearmanOf(-GOOD, GOLD, "x")) is None and ratio(good, Fixed(1.0)) is None


def test_averages_round_their_parts_and_resample_them_together() -> None:
    parts = [Fixed(1.005), Fixed(2.006)]
    assert AverageOf(parts).value == pytest.approx((round(1.005, 2) + 2.01) / 2)
    assert AverageOf(parts).resampled is None and difference(AverageOf(parts), AverageOf(parts)) is None
    exact = MeanOf(GOOD, "x", scale=1)
    both = AverageOf([exact, exact])
    assert both.resampled is not None
    np.testing.assert_allclose(both.resampled, exact.resampled)
