"""Contamination: the share of a test set's sentences that the training text contained, and what keeps both apart.

Scores on such sentences are transductive and are marked in tables. Sentences are compared exactly, and without case,
punctuation and spacing; shares are of the second kind. A run stores its result in the model's folder, so that later
evaluations know it too, and models that start from this one inherit it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distcse.errors import EvaluationDataError, EvaluationResultError, InvalidValueError
from distcse.evaluation.suites import STSB_DEV, DatasetFolder, Tasks, published
from distcse.evaluation.tasks.pairs import PairClassificationTask
from distcse.evaluation.tasks.sts import ScoredPairs, StsTask
from distcse.model_source import resolve_model
from distcse.recipe import CorpusSection
from distcse.storage import ArtifactStore, open_store, sha256, to_uri
from distcse.text import Excluded, normalized_key

_FILE = Path("distcse") / "contamination.json"
TRANSDUCTIVE_FROM = 0.5
NOTICED_FROM = 0.01


@dataclass(frozen=True)
class OverlapCounts:
    """Number of a test set's distinct sentences that a training corpus contains."""

    sentences: int
    """Distinct sentences of the set, without those that contain no letter or digit."""
    exact: int
    """Sentences that the corpus contains exactly."""
    normalized: int
    """Sentences that the corpus contains, ignoring case, punctuation and spacing; includes the exact ones."""


@dataclass(frozen=True)
class Contamination:
    """Share of each test set's sentences that a training corpus contains, by fingerprint of the set."""

    overlap: Mapping[str, float]
    overlap_counts: Mapping[str, OverlapCounts] = field(default_factory=dict)
    """The counts behind the shares."""

    def overlap_of(self, sentences: Iterable[str]) -> float | None:
        """Return the share of a set; None if the run did not check this set."""
        return self.overlap.get(fingerprint(sentences))

    def describe(self, excluding_key: str | None) -> str:
        """Summarize all sets; the key is the recipe's that would leave these sentences out of the text, if it has one."""
        total, exact, normalized = (
            sum(getattr(counts, name) for counts in self.overlap_counts.values())
            for name in ("sentences", "exact", "normalized")
        )
        if not normalized:
            return f"the training text contains none of {total:,} labeled sentences"
        advice = f"; set {excluding_key}: true to leave them out" if excluding_key else ""
        return (
            f"of {total:,} labeled sentences the training text contains {exact:,} exactly, {normalized:,} ignoring case and "
            f"punctuation{advice}"
        )

    def write(self, model: Path | ArtifactStore) -> Contamination:
        """Add the result to what a model's folder records, such as that of its initial model, and return both."""
        store = open_store(model)
        both = Contamination.of_several([self, Contamination.read(store.path)])
        found = {
            key: {"share": share, **(asdict(both.overlap_counts[key]) if key in both.overlap_counts else {})}
            for key, share in both.overlap.items()
        }
        store.write_part(str(_FILE), json.dumps(found, indent=2))
        store.publish()
        return both

    @classmethod
    def of_model(cls, name: str) -> Contamination:
        """Read the result from the folder of a model by its name (see `resolve_model`)."""
        return cls.read(resolve_model(name))

    @classmethod
    def read(cls, model: Path) -> Contamination:
        """Read the result from a model's folder; empty if distcse did not train the model."""
        file = model / _FILE
        if not file.is_file():
            return cls({})
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            shares = {key: float(entry.pop("share")) for key, entry in found.items()}
            return cls(shares, {key: OverlapCounts(**entry) for key, entry in found.items() if entry})
        except (OSError, ValueError, AttributeError, KeyError, TypeError, OverflowError) as broken:
            raise EvaluationResultError(
                f"{to_uri(file)} cannot be read ({broken}), so the test sentences in the training text are unknown; restore the "
                "file, or remove it"
            ) from None

    @classmethod
    def of_several(cls, members: Iterable[Contamination]) -> Contamination:
        """Return what an ensemble, or a model trained on several texts, has seen of each set: at least the largest share."""
        shares: dict[str, float] = {}
        counts: dict[str, OverlapCounts] = {}
        for member in members:
            for key, share in member.overlap.items():
                if key not in shares or share > shares[key]:
                    shares[key] = share
                    counts.pop(key, None)
                    if key in member.overlap_counts:
                        counts[key] = member.overlap_counts[key]
        return cls(shares, counts)

    @classmethod
    def measure(cls, corpus: Iterable[str], sets: Iterable[Iterable[str]]) -> Contamination:
        """Measure which of the sets' distinct sentences a corpus contains, in one pass over the corpus."""
        texts = [{_one_line(sentence): normalized_key(sentence) for sentence in sentences} for sentences in sets]
        keys = [{key for key in key_of.values() if key} for key_of in texts]
        wanted: set[str] = set().union(*keys)
        exactly: set[str] = set().union(*texts)
        normalized: set[str] = set()
        exact: set[str] = set()
        for sentence in corpus if wanted else ():
            if (key := normalized_key(sentence)) in wanted:
                normalized.add(key)
                if (text := _one_line(sentence)) in exactly:
                    exact.add(text)
        shares, counts = {}, {}
        for key_of, set_keys in zip(texts, keys, strict=True):
            if set_keys:
                digest, overlap = _digest(set_keys), set_keys & normalized
                shares[digest] = len(overlap) / len(set_keys)
                exact_keys = {key_of[text] for text in key_of.keys() & exact}
                counts[digest] = OverlapCounts(len(set_keys), len(exact_keys), len(overlap))
        return cls(shares, counts)


def fingerprint(sentences: Iterable[str]) -> str:
    """Hash the set of normalized sentences, independent of their order."""
    return _digest({key for sentence in sentences if (key := normalized_key(sentence))})


def _one_line(sentence: str) -> str:
    """Normalize spacing as the corpus does."""
    return " ".join(sentence.split())


def _digest(keys: set[str]) -> str:
    return sha256(["\n".join(sorted(keys)).encode()])[:16]


_MAX_SHARED_PAIRS = 0.5
"""From this share of a test set's pairs on, a dev set counts as that test set.

STS-B dev, a sample of the years' STS sets, contains 8.8 % of STS12 and less of the others.
"""


def evaluation_sentences(section: CorpusSection, folder: Path | None, extra: Iterable[str] = ()) -> Excluded | None:
    """Return the sentences to exclude from a corpus: those of the labeled sets; None if the recipe excludes none."""
    if not section.exclude_evaluation:
        return None
    sentences = [*extra]
    if folder is not None:
        tasks = published(folder, ("sts", "transfer", "pairs", "retrieval")).tasks
        sentences += [text for task in tasks for text in task.sentences()]
        if (dev := DatasetFolder(folder).load(STSB_DEV)) is not None:
            sentences += ScoredPairs.of(STSB_DEV.name, dev["dev"]).unique
    if not sentences:
        raise EvaluationDataError(f"corpus.exclude_evaluation: {folder} contains no labeled set; set evaluation.data")
    return Excluded.of(sentences)


def refuse_test_as_dev(first: Sequence[str], second: Sequence[str], tests: Tasks, is_allowed: bool) -> None:
    """Check that the dev pairs are not a test set, whose scores would be biased by the selection of a checkpoint."""
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
