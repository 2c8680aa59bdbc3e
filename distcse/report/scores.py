"""Scores of several models as Python shows them: printed as tables, as a data frame, LaTeX or report pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from distcse.evaluation import Choice, Evaluation
from distcse.report.exports import scores_tex
from distcse.report.grids import grids, legend, markdown_table
from distcse.report.terminal import evaluation_text
from distcse.report.verdict import verdict
from distcse.storage import resolve_path

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, repr=False)
class Scores:
    """Scores of several models; `print` and notebooks show them as tables."""

    evaluation: Evaluation
    choice: Choice | None = None
    """The best model under the given limits; None without limits."""

    def score(self, suite: str, dataset: str, measure: str, model: str) -> float:
        """Return one of the scores, such as `score("sts", "STS-B", "all", "student")`.

        Raises:
            EvaluationResultError: It was not measured.
        """
        return self.evaluation.score(suite, dataset, measure, model)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return the scores of each model, such as `{"student": {"sts/STS-B/all": 78.5}}`."""
        found: dict[str, dict[str, float]] = {about.name: {} for about in self.evaluation.models}
        for score in self.evaluation.scores:
            for model, value in score.values.items():
                found[model][f"{score.suite}/{score.set}/{score.measure}"] = value
        return found

    def to_pandas(self) -> pandas.DataFrame:
        """Return a data frame with a row per model, and a column per suite, set and measure."""
        import pandas

        columns = {(score.suite, score.set, score.measure): score.values for score in self.evaluation.scores}
        names = [about.name for about in self.evaluation.models]
        return pandas.DataFrame(columns, index=names).rename_axis(columns=["suite", "set", "measure"])

    def to_latex(self) -> str:
        """Return the tables in LaTeX, for the package booktabs; the best score of a column is bold."""
        return scores_tex(self.evaluation)

    def write(self, folder: str | Path) -> Sequence[Path]:
        """Write the pages, evaluation.json, scores.csv and scores.tex into a folder, which is created; return the pages."""
        from distcse.report.page import write_pages  # imports the plotting library, which takes 0.5 s

        resolve_path(folder).mkdir(parents=True, exist_ok=True)
        self.evaluation.write(resolve_path(folder))
        return write_pages(self.evaluation, resolve_path(folder))

    def __repr__(self) -> str:
        return evaluation_text(self.evaluation)

    def _repr_markdown_(self) -> str:
        lines = [*(f"- {line}" for line in verdict(self.evaluation).values()), ""]
        for grid in grids(self.evaluation):
            lines += [f"**{grid.title}**{f' ({grid.measure})' if grid.measure else ''}", "", *markdown_table(grid), ""]
        return "\n".join([*lines, *(f"- {line}" for line in legend(self.evaluation))])
