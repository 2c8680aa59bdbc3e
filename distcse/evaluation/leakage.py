"""Keep training data, the dev set and test sets disjoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from distcse.data import Excluded, normalized_key
from distcse.errors import EvaluationDataError, InvalidValueError
from distcse.evaluation.catalogue import STSB_DEV, DatasetFolder
from distcse.evaluation.pairs import PairClassificationTask
from distcse.evaluation.sts import ScoredPairs, StsTask
from distcse.evaluation.suites import Tasks, published
from distcse.recipe import CorpusSection

_MAX_SHARED_PAIRS = 0.5
"""From this share of a test set's pairs on, a dev set counts as that test set.

STS-B dev, a sample of the years' STS sets, contains 8.8 % of STS12 and less of the others.
"""


def evaluation_sentences(section: CorpusSection, data: str | None, extra: Iterable[str] = ()) -> Excluded | None:
    """Return the sentences to exclude from a corpus: those of the labelled sets; None if the recipe excludes none.

    Args:
        section: The recipe's `corpus`.
        data: The folder with labelled sets, `evaluation.data`, if the recipe has one.
        extra: More sentences to exclude: those of the dev set, which may be a file of the user's.

    Raises:
        EvaluationDataError: The folder does not exist or contains no labelled set.
        EvaluationFormatError: A file is malformed.
    """
    if not section.exclude_evaluation:
        return None
    sentences = [*extra]
    if data is not None:
        tasks = published(Path(data), ("sts", "transfer", "pairs")).tasks
        sentences += [text for task in tasks for text in task.sentences()]
        if (dev := DatasetFolder.of(Path(data)).load(STSB_DEV)) is not None:
            sentences += ScoredPairs.of(STSB_DEV.name, dev["dev"]).unique
    if not sentences:
        raise EvaluationDataError(f"corpus.exclude_evaluation: {data} contains no labelled set; set evaluation.data")
    return Excluded.of(sentences)


def refuse_test_as_dev(first: Sequence[str], second: Sequence[str], tests: Tasks, is_allowed: bool) -> None:
    """Check that the dev pairs are not a test set, whose scores would be biased by the selection of a checkpoint.

    Args:
        first: First sentences of the dev pairs.
        second: Second sentences.
        tests: Tasks of the final evaluation.
        is_allowed: The recipe's `evaluation.dev_is_test`, which skips the check.

    Raises:
        InvalidValueError: The dev pairs contain at least half of a test set's pairs.
    """
    if is_allowed:
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
        if share >= _MAX_SHARED_PAIRS:
            raise InvalidValueError(
                f"the dev set contains {100 * share:.0f} % of the pairs of test set {task.name}, so the test score would be "
                "biased by checkpoint selection; set evaluation.dev to another set, or evaluation.dev_is_test: true"
            )


def _pairs(first: Sequence[str], second: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the set of unordered pairs of normalized sentences."""
    return {
        tuple(sorted((normalized_key(one), normalized_key(other)))) for one, other in zip(first, second, strict=True)
    }
