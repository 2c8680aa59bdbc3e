"""What `import distcse` gives: train, evaluate, embed, export, share and plan. The commands print what these functions return."""

from distcse.api.models import export, rank
from distcse.api.results import Run, Runs, evaluate
from distcse.api.training import check, compare, distill, embed, plan, rerun, resume, run
from distcse.report.scores import Scores

__all__ = [
    "Run",
    "Runs",
    "Scores",
    "check",
    "compare",
    "distill",
    "embed",
    "evaluate",
    "export",
    "plan",
    "rank",
    "rerun",
    "resume",
    "run",
]
