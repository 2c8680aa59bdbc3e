"""Trans-Encoder: the paper's loop step by step, labels of several groups, runs that are stopped, broken and resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distcse.events import Doing, Event, InGroup, Watch
from distcse.mutual import run_mutual
from tests.pairs import make_mutual_recipe


def test_a_run(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    events: list[Event] = []
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    result = run_mutual(make_mutual_recipe(tmp_path, models, sentences), Watch(events.append))
    for e in events:
        print(e)
    print(result)
