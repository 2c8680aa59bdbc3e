"""Each protocol by hand, against the oracles, scipy and scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kendalltau, spearmanr
from sklearn.metrics import ndcg_score, roc_auc_score

from distcse.errors import EvaluationError
from distcse.evaluation import RetrievalDataset, RetrievalTask, ScoredPairs, StsTask, VectorModel, agreement, sts_score
from distcse.evaluation.geometry import GeometryTask, alignment, uniformity
from distcse.evaluation.models import PairModel
from distcse.evaluation.pairs import PairClassificationTask
from distcse.evaluation.ranking import RankingTask, kendall, ndcg, ranked_lists


def unit(vectors: np.ndarray) -> np.ndarray:
    result: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return result


def pairs_of(rows: list[tuple[str, str, float]], subsets: list[str] | None = None) -> ScoredPairs:
    first, second, gold = ([row[place] for row in rows] for place in range(3))
    return ScoredPairs("set", first, second, np.array(gold, dtype=float), np.array(subsets or [""] * len(rows)))


class Given:
    """A scorer of pairs that says what it is told to."""

    def __init__(self, scores: dict[tuple[str, str], float]) -> None:
        self._scores = scores

    def similarities(self, first: Any, second: Any) -> np.ndarray:
        return np.array([self._scores[pair] for pair in zip(first, second, strict=True)])


def letters(texts: Any) -> np.ndarray:
    """An encoder that counts letters."""
    return np.array([[text.count(letter) for letter in "abcd"] for text in texts], dtype=np.float32)


def test_agreement_is_the_mean_of_scipys_correlations() -> None:
    generator = np.random.default_rng(0)
    student, teacher = unit(generator.normal(size=(12, 4))), unit(generator.normal(size=(12, 6)))
    ours, theirs = student @ student.T, teacher @ teacher.T
    rows = [spearmanr(np.delete(ours[i], i), np.delete(theirs[i], i)).statistic for i in range(12)]
    assert agreement(student, theirs) == pytest.approx(100 * np.mean(rows), abs=1e-9)
    assert agreement(teacher, theirs) == pytest.approx(100)
    assert agreement(np.ones((12, 1)), theirs) == 0


def test_sts_aggregates_are_those_of_the_oracle(oracles: dict[str, Any]) -> None:
    inputs, expected = (oracles["sts_all_aggregation"][key] for key in ("inputs", "expected"))
    cosines = inputs["cos_a"] + inputs["cos_b"]
    gold = inputs["gold_a"] + inputs["gold_b"]
    names = [(f"first {n}", f"second {n}") for n in range(len(gold))]
    subsets = ["a"] * len(inputs["gold_a"]) + ["b"] * len(inputs["gold_b"])
    pairs = pairs_of([(*name, score) for name, score in zip(names, gold, strict=True)], subsets)
    model: PairModel = Given(dict(zip(names, cosines, strict=True)))
    for chosen in ("all", "mean", "wmean"):
        outcome = StsTask(pairs, chosen).measure(model)  # type: ignore[arg-type]
        assert next(iter(outcome.figures)) == chosen
        for aggregate, value in expected.items():
            assert outcome.figures[aggregate].value == pytest.approx(100 * value, abs=1e-4)
    assert {name: count for name, (count, _) in outcome.details["subsets"].items()} == {"a": 6, "b": 9}


def test_a_vector_model_encodes_each_sentence_once() -> None:
    asked: list[str] = []

    def encode(texts: Any) -> np.ndarray:
        asked.extend(texts)
        return letters(texts)

    model = VectorModel(encode)
    pairs = pairs_of([("a", "ab", 3), ("a", "b", 1), ("ab", "abb", 2)])
    assert sts_score(model, pairs) == pytest.approx(100 * spearmanr([0.5**0.5, 0, 0.9487], [3, 1, 2]).statistic)
    sts_score(model, pairs)
    assert sorted(asked) == ["a", "ab", "abb", "b"]
    assert model.similarities(["x"], ["a"]).tolist() == [0]  # no direction: SentEval's nan_to_num


def test_a_collapsed_model_scores_nothing_and_a_diverged_one_is_refused() -> None:
    pairs = pairs_of([("a", "ab", 3), ("a", "b", 1), ("ab", "abb", 2)])
    assert sts_score(VectorModel(lambda texts: np.ones((len(texts), 3))), pairs) == 0
    diverged = VectorModel(lambda texts: np.full((len(texts), 3), np.nan))
    with pytest.raises(EvaluationError, match=r"no numbers .* for 4 of 4 texts; it has diverged"):
        sts_score(diverged, pairs)


def test_pairs_are_scikit_learns_auc() -> None:
    labels, scores = np.array([0, 1, 1, 0, 1]), np.array([0.3, 0.3, 0.9, 0.1, 0.2])
    names = [f"s{n}" for n in range(5)]
    task = PairClassificationTask("set", names, names, labels)
    outcome = task.measure(Given({(n, n): s for n, s in zip(names, scores, strict=True)}))
    assert outcome.figures["auc"].value == pytest.approx(100 * roc_auc_score(labels, scores))


def test_ranking_figures_are_those_of_the_oracle(oracles: dict[str, Any]) -> None:
    case = oracles["kcc_ndcg_table1"]
    gold = np.array(case["inputs"]["gold"])
    for system in ("simcse", "rankcse"):
        similarities = np.array(case["inputs"][system])
        assert kendall(similarities, gold) == pytest.approx(case["expected"][f"kcc_{system}"], abs=1e-6)
        assert ndcg(similarities, gold) == pytest.approx(case["expected"][f"ndcg_lin_{system}"], abs=1e-6)
    rows = [("query", f"partner {n}", score) for n, score in enumerate(gold)]
    scores = {("query", f"partner {n}"): s for n, s in enumerate(case["inputs"]["simcse"])}
    outcome = RankingTask(pairs_of(rows)).measure(Given(scores))
    assert outcome.details == {"lists": 1}
    assert outcome.figures["kcc"].value == pytest.approx(40) and outcome.figures["ndcg"].value == pytest.approx(94.5488)


def test_lists_come_from_either_column_and_need_four_partners() -> None:
    rows = [("q", "a", 1.0), ("b", "q", 2.0), ("q", "c", 3.0), ("d", "q", 4.0), ("q", "a", 3.0), ("q", "q", 5.0)]
    rows += [("few", "a", 1.0), ("few", "b", 2.0), ("few", "c", 3.0)]
    rows += [("flat", p, 2.0) for p in ("w", "x", "y", "z")]
    (found,) = ranked_lists(pairs_of(rows))
    assert found.query == "q" and found.candidates == ["a", "b", "c", "d"]
    assert found.gold.tolist() == [2, 2, 3, 4]  # scored twice: the mean; `flat` has no order, `few` has three
    similarities = np.array([0.1, 0.2, 0.2, 0.9])
    assert kendall(similarities, found.gold) == pytest.approx(kendalltau(similarities, found.gold).statistic)
    assert ndcg(similarities, found.gold) == pytest.approx(ndcg_score([found.gold], [similarities]))
    assert kendall(np.ones(4), found.gold) == 0


def test_alignment_and_uniformity_are_those_of_the_oracle(oracles: dict[str, Any]) -> None:
    case = oracles["align_uniform"]
    z1, z2 = (unit(np.array(case["inputs"][name])) for name in ("z1", "z2"))
    assert alignment(z1, z2).mean() == pytest.approx(case["expected"]["align"], abs=1e-6)
    assert uniformity(np.concatenate([z1, z2])) == pytest.approx(case["expected"]["uniform_pdist"], abs=1e-6)


def test_geometry_takes_its_pairs_by_gold_score() -> None:
    rows = [("a", "ab", 5.0), ("b", "bbc", 4.0), ("c", "cccd", 3.4), ("d", "da", 0.0), ("ac", "bd", 2.9)]
    pairs = pairs_of(rows)
    model = VectorModel(letters)
    outcome = GeometryTask(pairs).measure(model)
    a, ab = model.unit_vectors(["a", "ab"])
    assert outcome.figures["alignment"].value == pytest.approx(((a - ab) ** 2).sum(), abs=1e-6)  # above 4 alone
    assert outcome.figures["uniformity"].value == pytest.approx(uniformity(model.unit_vectors(pairs.unique)))
    similar = model.similarities(pairs.first[:3], pairs.second[:3])
    assert outcome.figures["similar"].value == pytest.approx(100 * spearmanr(similar, pairs.gold[:3]).statistic)
    groups = outcome.details["cosines"]
    assert [(group["gold"], group["pairs"]) for group in groups] == [
        ([0, 1], 1),
        ([2, 3], 1),
        ([3, 4], 1),
        ([4, 5], 2),  # 5 itself belongs to the last group
    ]
    assert all(sum(group["histogram"]) == group["pairs"] for group in groups)


def test_retrieval_by_hand() -> None:
    documents = ["d0", "d1", "d2", "d3"]
    vectors = {name: row for name, row in zip(documents, np.eye(4), strict=True)}
    vectors |= {"q0": [1, 0, 0, 0], "q1": [0.9, 1, 0, 0], "q2": [1, 0.9, 0.8, 0], "q3": [1, 1, 1, 0.0]}
    model = VectorModel(lambda texts: np.array([vectors[text] for text in texts], dtype=np.float32))
    own: list[dict[int, float]] = [{n: 1.0} for n in range(4)]
    collection = RetrievalDataset(["q0", "q1", "q2", "q3"], documents, own, [None] * 4)
    figures = RetrievalTask("set", collection).measure(model).figures
    # Ranks 1, 1, 3 and, d3 being as far as nothing, 4.
    assert figures["recall@1"].value == 50 and figures["recall@5"].value == 100
    assert figures["mrr@10"].value == pytest.approx(100 * (1 + 1 + 1 / 3 + 1 / 4) / 4)
    assert figures["ndcg@10"].value == pytest.approx(100 * (1 + 1 + 1 / 2 + 1 / np.log2(5)) / 4)
    tied = VectorModel(lambda texts: np.ones((len(texts), 2), dtype=np.float32))
    assert RetrievalTask("set", collection).measure(tied).figures["recall@1"].value == 0  # ties do not help


def test_retrieval_with_several_graded_documents() -> None:
    vectors = {"q": [1.0, 0], "best": [1, 0.1], "good": [1, 0.5], "noise": [1, 0.2], "far": [0, 1]}
    model = VectorModel(lambda texts: np.array([vectors[text] for text in texts], dtype=np.float32))
    collection = RetrievalDataset(["q"], ["best", "good", "noise", "far"], [{0: 2.0, 1: 1.0}], [None])
    figures = RetrievalTask("set", collection).measure(model).figures
    assert figures["recall@1"].value == 50 and figures["recall@5"].value == 100
    gold, cosines = np.array([[2.0, 1, 0, 0]]), np.array([[0.99, 0.89, 0.98, 0]])
    assert figures["ndcg@10"].value == pytest.approx(100 * ndcg_score(gold, cosines, k=10), abs=1e-4)


def test_paraphrases_look_for_each_other_both_ways() -> None:
    pairs = pairs_of([("a", "ab", 5.0), ("b", "c", 4.9), ("d", "d", 5.0), ("ac", "a", 5.0)])
    collection = RetrievalDataset.paraphrases(pairs)
    assert collection.queries == ["a", "ac", "ab", "a"]
    assert [collection.documents[next(iter(own))] for own in collection.relevant] == ["ab", "a", "a", "ac"]
    assert [collection.documents[place] for place in collection.excluded if place is not None] == collection.queries
    with pytest.raises(EvaluationError, match="no pair scored 5"):
        RetrievalDataset.paraphrases(pairs_of([("a", "b", 1.0)]))


def test_collections_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "queries.tsv").write_text("id\ttext\nq1\tfirst\nq2\tunasked\nd1\tsame id\n")
    (tmp_path / "corpus.jsonl").write_text(
        '{"_id": "d1", "title": "T", "text": "x"}\n{"_id": "d2", "title": "", "text": "y"}'
    )
    (tmp_path / "relevant.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nd1\td2\t1\n")
    collection = RetrievalDataset.read(tmp_path)
    assert collection == RetrievalDataset(["first", "same id"], ["T x", "y"], [{0: 2.0}, {1: 1.0}], [None, 0])
    for file, line, told in (
        ("relevant.tsv", "q9\td1\t1", "line 5: 'q9' is no id in .*queries.tsv"),
        ("relevant.tsv", "q1\td9\t1", "line 5: 'd9' is no id in .*corpus.jsonl"),
        ("queries.tsv", "q1\tagain", "line 5: id 'q1' is there twice"),
    ):
        before = (tmp_path / file).read_text()
        (tmp_path / file).write_text(f"{before}{line}\n")
        with pytest.raises(EvaluationError, match=told):
            RetrievalDataset.read(tmp_path)
        (tmp_path / file).write_text(before)
    (tmp_path / "relevant.tsv").unlink()
    with pytest.raises(EvaluationError, match=r"holds no relevant.tsv \(or .tsv.gz"):
        RetrievalDataset.read(tmp_path)
