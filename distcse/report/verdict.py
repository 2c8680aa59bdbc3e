"""The verdict of an evaluation: what each student keeps of the model that it is compared with, and its speed and size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean

from distcse.evaluation import Evaluation, ModelInfo, Score
from distcse.evaluation.bootstrap import Interval
from distcse.evaluation.contamination import NOTICED_FROM, TRANSDUCTIVE_FROM
from distcse.evaluation.results import compute_spread, group_runs, headlines
from distcse.evaluation.tasks.agreement import KEPT

TRANSDUCTIVE, NOTICED = "‡", "†"
_NOT_STUDENTS = re.compile(r"teacher|(.* )?start( ensemble)?$")
"""Names in the tables of runs."""
_LABELLED = ("retrieval", "sts")
"""Suites of which a verdict states both; of others it states the first."""
_NAMES = {"ndcg@10": "nDCG@10", **dict.fromkeys(("all", "mean", "wmean"), "STS Spearman"), "auc": "AUC", "kcc": "τ-b"}
_AGREEMENTS = {
    "agreement": ("has a Spearman ×100 of", "", " with its teachers' lists"),
    "overlap@10": ("finds", " %", " of its teachers' ten nearest documents"),
    "pearson": ("has a Pearson ×100 of", "", " with {whose} similarities"),
    KEPT: ("keeps", " %", " of {whose} ten nearest neighbors"),
}
"""By measure, the words before a score that is an agreement, its unit, and the words after it."""


def verdict(evaluation: Evaluation) -> dict[str, str]:
    """Return a line for each student by its name, with 95 % intervals, or for several runs the mean ± standard deviation.

    Such as "student keeps 97.2 % [96.1, 98.3] of the teacher's nDCG@10 (docstrings), 2.1x as fast, 17 MB instead of 91 MB".
    """
    infos = {about.name: about for about in evaluation.models}
    shown = headlines(evaluation.scores)
    shown = [score for score in shown if score.suite in _LABELLED] or shown[:1]
    lines = {}
    for name, runs in _students(evaluation).items():
        quality = " and ".join(filter(None, (_quality(evaluation, score, runs) for score in shown)))
        costs = _costs([infos[run] for run in runs], infos[evaluation.base])
        if quality or costs:
            lines[name] = f"{name} {', '.join([quality or f'is {costs.pop(0)}', *costs])}"
    return lines


def explain(evaluation: Evaluation) -> str:
    """Return what the verdict's lines compare with, and what their brackets and signs mean."""
    lines = "".join(verdict(evaluation).values())
    parts = [f"Compared with {evaluation.base}."]
    parts += ["In brackets: 95 % intervals of the paired bootstrap."] if " [" in lines else []
    parts += ["±: standard deviation over runs."] if "±" in lines else []
    return " ".join(parts)


def by_interest(evaluation: Evaluation) -> list[ModelInfo]:
    """Return the models, students first, the one that they are compared with second; without other formats of vectors."""
    students = {run for runs in _students(evaluation).values() for run in runs}
    found = [about for about in evaluation.models if not _is_format(about.name, evaluation)]
    return sorted(found, key=lambda about: (about.name not in students, about.name != evaluation.base))


def score_name(score: Score) -> str:
    """Return a score's short name with its set, such as `nDCG@10 (docstrings)`."""
    return f"{_NAMES.get(score.measure, score.measure)} ({score.set})"


def mark_of(share: float) -> str:
    """Return the mark of a score on a set with this fraction of its sentences in the training text."""
    return TRANSDUCTIVE if share >= TRANSDUCTIVE_FROM else NOTICED if share >= NOTICED_FROM else ""


def _students(evaluation: Evaluation) -> dict[str, list[str]]:
    """Return the runs of each model but the one that is compared with; if there are others, without teachers and starts."""
    groups = group_runs(about.name for about in evaluation.models if not _is_format(about.name, evaluation))
    others = {name: runs for name, runs in groups.items() if evaluation.base not in runs}
    return {name: runs for name, runs in others.items() if not _NOT_STUDENTS.match(name)} or others


def _is_format(name: str, evaluation: Evaluation) -> bool:
    """Whether a row is of another row's model, with fewer dimensions or quantized vectors."""
    return any(name.startswith(f"{about.name}, ") for about in evaluation.models)


def _quality(evaluation: Evaluation, score: Score, runs: Sequence[str]) -> str:
    """Return what models keep of a score; empty if they or the model that they are compared with have none."""
    base = evaluation.base
    whose = f"the {base}'s" if base == "teacher" else f"{base}'s"
    values = [score.values[run] for run in runs if run in score.values]
    if not values:
        return ""
    if score.measure in _AGREEMENTS:
        before, unit, after = (text.format(whose=whose) for text in _AGREEMENTS[score.measure])
        return f"{before} {_amount(values, unit, score.intervals.get(runs[0]))}{after}"
    if (theirs := score.values.get(base, 0.0)) <= 0:
        return ""
    shares, compared = [100 * value / theirs for value in values], score.compared(runs[0], base)
    amount = _amount(shares, " %", None if compared is None else compared.ratio) if fmean(shares) > 0 else "nothing"
    mark = mark_of(max(evaluation.overlap_fraction(score, run) for run in runs))
    return f"{'keeps' if fmean(shares) <= 100 else 'reaches'} {amount} of {whose} {score_name(score)}{mark}"


def _amount(values: Sequence[float], unit: str, interval: Interval | None) -> str:
    spread = compute_spread(values)
    if spread.number > 1:
        return f"{spread.mean:.1f} ± {spread.deviation:.1f}{unit}"
    return f"{spread.mean:.1f}{unit}" + (f" [{interval.low:.1f}, {interval.high:.1f}]" if interval else "")


def _costs(ours: Sequence[ModelInfo], theirs: ModelInfo) -> list[str]:
    """Return speed and size of runs of one model, relative to the model that they are compared with, where they were measured."""
    found = []
    speeds = [about.sentences_per_s for about in ours if about.sentences_per_s]
    same_unit = len({"cross-encoder" in about.kind for about in (*ours, theirs)}) == 1  # pairs or sentences
    if speeds and theirs.sentences_per_s and same_unit:
        found.append(f"{_short(fmean(speeds) / theirs.sentences_per_s)}x as fast")
    if size := fmean(about.size_bytes for about in ours) / 1e6:
        texts = dict.fromkeys(_short(mb) for mb in (size, theirs.size_bytes / 1e6) if mb)
        found.append(" instead of ".join(f"{text} MB" for text in texts))
    return found


def _short(number: float) -> str:
    return f"{number:.1f}" if number < 9.95 else f"{number:,.0f}"
