"""Keeping apart what is learned from, what chooses, and what is measured on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from distcse.data import Excluded, normalized_key
from distcse.errors import EvaluationDataError, InvalidValueError
from distcse.evaluation.catalogue import STSB_DEV, DatasetFolder
from distcse.evaluation.pairs import PairClassificationTask
from distcse.evaluation.sts import ScoredPairs, StsTask
from distcse.evaluation.suites import EvalConfig, Tasks, published
from distcse.recipe import CorpusSection

_MOST = 0.5
"""Share of a test set's pairs from which on a dev set that holds them is that test set. STS-B dev, which was drawn from the
years' data, holds 8.8 % of STS12 and less of the others."""


def excluded_from(section: CorpusSection, data: str | None, also: Iterable[str] = ()) -> Excluded | None:
    """The sentences that a corpus shall not hold: those of all labelled sets of a folder; None where it may hold any.

    Args:
        section: The corpus's part of a recipe.
        data: The folder.
        also: Sentences of a dev set that lies elsewhere.

    Raises:
        EvaluationError: There is no labelled set.
    """
    if not section.exclude_evaluation:
        return None
    folder = Path(str(data))
    sentences = [
        text
        for task in published(folder, ("sts", "transfer", "pairs"), EvalConfig()).tasks
        for text in task.sentences()
    ]
    if (dev := DatasetFolder.of(folder).load(STSB_DEV)) is not None:
        sentences += ScoredPairs.of(STSB_DEV.name, dev["dev"]).unique
    sentences += also
    if not sentences:
        raise EvaluationDataError(f"corpus.exclude_evaluation: {folder} holds no labelled set; set evaluation.data")
    return Excluded.of(sentences)


def refuse_test_as_dev(first: Sequence[str], second: Sequence[str], tests: Tasks, is_meant: bool) -> None:
    """Raise `RecipeError` where the dev pairs hold most of a test set's pairs: what chooses a model cannot measure it.

    Args:
        first: First sentences of the dev pairs.
        second: Second sentences.
        tests: What is measured at the end.
        is_meant: Whether the recipe says so in so many words.
    """
    if is_meant:
        return
    dev = _pairs(first, second)
    for task in tests.tasks:
        if isinstance(task, StsTask):
            test = _pairs(task.pairs.first, task.pairs.second)
        elif isinstance(task, PairClassificationTask):
            test = _pairs(task.first, task.second)
        else:
            continue
        share = len(dev & test) / max(1, len(test))
        if share >= _MOST:
            raise InvalidValueError(
                f"the dev set holds {100 * share:.0f} % of the pairs of test set {task.name}: a figure on what chose the model "
                "is no measurement; name another dev set (evaluation.dev), or write evaluation.dev_is_test: true"
            )


def _pairs(first: Sequence[str], second: Sequence[str]) -> set[tuple[str, ...]]:
    """Pairs of sentences, whatever their order, case and punctuation."""
    return {
        tuple(sorted((normalized_key(one), normalized_key(other)))) for one, other in zip(first, second, strict=True)
    }
