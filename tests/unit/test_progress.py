"""Views of a run's progress: live, plain, quiet and JSON; and the first line, which comes before slow imports."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from rich.console import Console

from distcse.cli.shared import COMMANDS
from distcse.events import (
    DevScore,
    Event,
    GroupActivity,
    GroupEvent,
    LogMessage,
    StageProgress,
    StepReport,
    TrialUpdate,
)
from distcse.recipe import recipe_yaml
from distcse.report.progress import LiveView, PlainView, live_progress, open_view
from distcse.runs.directory import RunDirectory
from tests.commands import run_command
from tests.jobs import make_recipe

STEPS = StepReport(4_200, 12_000, {"loss": 1.25, "info_nce": 0.4, "rank": 0.85}, 2e-5, 0.5, 0.01)
RUN: list[Event] = [
    LogMessage("run directory runs/small"),
    StageProgress("corpus", 500, 1000, "sentences"),
    StageProgress("corpus", 1000, 1000, "sentences", finished=True, note="1,000 sentences"),
    *(DevScore(step, 12_000, "agreement", score, 61.0, 200) for step, score in ((100, 50.0), (200, 61.0), (300, 55.5))),
    STEPS,
    LogMessage("2 rows are blank", warning=True),
]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("distcse.report.progress.time.monotonic", lambda: now[0])
    return now


def live(width: int, events: Iterable[Event]) -> tuple[list[str], str]:
    """Return the bars on a terminal of the given width, and the lines printed above them."""
    console = Console(file=(above := io.StringIO()), force_terminal=True, width=width, no_color=True, color_system=None)
    progress = live_progress(console)
    view = LiveView(console, progress)
    for event in events:
        view.show(event)
    shown = Console(file=(bars := io.StringIO()), width=width, no_color=True)
    shown.print(progress.get_renderable())
    return bars.getvalue().rstrip("\n").split("\n"), above.getvalue()


@pytest.mark.parametrize("width", [60, 100, 160])
def test_a_narrow_terminal_cuts_off_only_the_right_end(width: int) -> None:
    (bar,), above = live(width, RUN)
    assert len(bar) <= width
    assert bar.startswith("train") and "4,200/12,000" in bar and "1:05:00" in bar and "2.00 steps/s" in bar
    assert ("dev 55.50 ▁█▄" in bar) is ("loss 1.2500" in bar) is (width >= 100)
    assert ("teacher wait 2.0%" in bar) is (width >= 160)
    assert "corpus    1,000 sentences" in above and "agreement 55.50  (best 61.00 at step 200)" in above
    last = StepReport(12_000, 12_000, {"loss": 1.0}, 0.0, 0.5, 0.0)
    assert live(width, [*RUN, last])[0] == [""], "the last step removes the bar"


def test_each_group_and_each_trial_has_a_bar() -> None:
    events = [
        GroupEvent("full", GroupActivity("cycle 1 bi", "training")),
        GroupEvent("full", STEPS),
        GroupEvent("even", GroupActivity("cycle 1 bi", "waiting", ["full"])),
        TrialUpdate("trial-3", "running", 40.0, 70.1, 71.2, {"objective.rank.tau2": 0.025}),
    ]
    bars, _ = live(110, events)
    assert [bar.split()[0] for bar in bars] == ["full", "even", "trial-3"]
    assert "waiting for full" in bars[1] and "40/100" in bars[2] and "dev 70.10 (best 71.20)" in bars[2]


def test_a_groups_scoring_is_shown_in_its_bar_and_in_its_line(clock: list[float]) -> None:
    def scoring() -> Iterable[Event]:
        yield GroupEvent("full", GroupActivity("start", "scoring"))
        for done in (1_000, 2_000):
            clock[0] += 60.0
            yield GroupEvent("full", StageProgress("scoring", done, 4_000, "pairs"))

    (bar,), _ = live(110, scoring())
    # The first 1,000 pairs were scored before the run was resumed: 2,000 are left at 1,000 a minute.
    assert "full" in bar and "2,000/4,000" in bar and "2:00" in bar and "start scoring" in bar
    lines = PlainView(Console(file=(log := io.StringIO()), width=110))
    for event in scoring():
        lines.show(event)
    assert "full      scoring 2,000/4,000 pairs" in log.getvalue()


def test_a_log_without_news_names_what_runs(clock: list[float]) -> None:
    view = PlainView(Console(file=(log := io.StringIO()), width=110))
    for event, named in (
        (None, "at the start"),
        (StageProgress("teacher 0", 0, 20_000, "sentences"), "at teacher 0 0/20,000 sentences"),
        (StageProgress("teacher 0", 20_000, 20_000, "sentences", finished=True), "after teacher 0 20,000 sentences"),
        (STEPS, "at train step 4200/12000 loss 1.2500"),
        (GroupEvent("bert", GroupActivity("cycle-1-cross", "scoring")), "at bert cycle-1-cross scoring"),
    ):
        if event is not None:
            view.show(event)
        clock[0] += 29.0
        view.remind()
        assert "waiting" not in log.getvalue()
        clock[0] += 1.0
        view.remind()
        view.remind()
        assert log.getvalue().count(f"waiting   30 s since the last line, {named}") == 1
        log.seek(0)
        log.truncate()


def test_without_a_terminal_every_line_is_plain_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view() as view:
        assert isinstance(view, PlainView)
        for event in RUN:
            view.show(event)
    printed = capsys.readouterr()
    assert printed.out == "" and "\x1b" not in printed.err
    lines = ("corpus    1,000 sentences", "step 4200/12000  loss 1.2500", "1:05:00 left", "warning   2 rows are blank")
    assert all(text in printed.err for text in lines)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("NO_COLOR", "1"), ("FORCE_COLOR", "1"), ("TERM", "xterm-256color")):
        monkeypatch.setenv(name, value)  # with FORCE_COLOR, rich assumes a terminal
    with open_view() as view:
        assert isinstance(view, LiveView)
        view.show(LogMessage("careful", warning=True))
    printed = capsys.readouterr().err
    assert "careful" in printed and "\x1b[33m" not in printed and "\x1b[36m" not in printed


def test_quiet_prints_only_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with open_view(quiet=True) as view:
        for event in RUN:
            view.show(event)
    assert capsys.readouterr() == ("", "warning   2 rows are blank\n")


def test_json_lines_equal_those_of_events_jsonl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that a kill cut short loses no other event."""
    directory, file = RunDirectory(tmp_path), tmp_path / "events.jsonl"
    directory.log(STEPS)
    file.write_bytes(file.read_bytes()[:-20])
    with open_view(json=True) as view:
        for event in [*RUN, GroupEvent("full", STEPS)]:
            view.show(event)
            directory.log(event)
    cut, *lines = file.read_text().splitlines()
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [{**line, "time": 0} for line in shown] == [{**json.loads(line), "time": 0} for line in lines]
    assert not cut.endswith("}")
    assert shown[-1]["group"] == "full" and shown[-1]["event"] == "StepReport" and shown[-1]["losses"]["rank"] == 0.85


LOADS = 75
"""Exit status of a command that imports a slow library."""
UNTIL_LOADING = f"""
import json, os, sys, tempfile
from importlib.machinery import ModuleSpec

class Stopper:
    def find_spec(self, name, path=None, target=None):
        slow = ("torch", "transformers", "ray", "scipy", "sklearn", "datasets", "pandas", "matplotlib", "optuna")
        return ModuleSpec(name, self) if name in slow else None

    def create_module(self, spec):
        os._exit({LOADS})  # leaves buffered output behind, which a user would not see either

    def exec_module(self, module): ...

sys.meta_path.insert(0, Stopper())
from distcse.cli import main
import distcse.recipe
results = []
for words in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as shown:
        if (child := os.fork()) == 0:
            os.dup2(shown.fileno(), 1), os.dup2(shown.fileno(), 2)
            sys.exit(main(words))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shown.seek(0)
        results.append((status, shown.read()))
json.dump(results, sys.stdout)
"""
CALLS = """
train RECIPE | train RECIPE --dry-run | train RECIPE training.workers=1 | train --resume RUN | tune RECIPE --space SPACE
tune RECIPE --space SPACE --print-space | tune --resume RUN | embed RECIPE | embed RECIPE --compare
data convert RUN --data OUT | plan RECIPE | plan RECIPE --cluster 8xA100-40G
recipe show quickstart | recipe validate RECIPE
doctor RECIPE | env | evaluate MODEL
rank MODEL --corpus TEXT --out OUT | export MODEL --onnx | push MODEL --to me/student --dry-run | completion bash
"""
WITHOUT_PYTORCH = {"recipe", "push", "completion"}
ON_A_CLUSTER = {"submit", "jobs", "logs", "stop"}
"""Commands that wait for a cluster, not for imports: test_jobs.py."""


def test_a_line_comes_before_slow_imports(
    tiny: Callable[..., Path], sentences: list[str], labelled: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, f"evaluation.data={labelled}")
    (tmp_path / "mine.yaml").write_text(recipe_yaml(recipe))
    places = {
        "RECIPE": tmp_path / "mine.yaml",
        "SPACE": "rankcse-listnet",
        "RUN": tmp_path,
        "MODEL": tiny("bert"),
        "TEXT": tmp_path / "corpus.txt",
        "OUT": tmp_path / "out",
        "DATA": labelled,
    }
    calls = [call.split() for call in CALLS.strip().replace("\n", " | ").split(" | ")]
    assert {call[0] for call in calls} == {*COMMANDS} - ON_A_CLUSTER
    words = [[str(places.get(word, word)) for word in call] for call in calls]
    done = run_command([sys.executable, "-c", UNTIL_LOADING, json.dumps(words)])
    assert done.returncode == 0, done.stderr
    for call, (status, shown) in zip(calls, json.loads(done.stdout), strict=True):
        assert status in (0, LOADS), (call, shown)
        if status == LOADS:
            assert call[0] not in WITHOUT_PYTORCH, call
            assert "loading   PyTorch" in shown, (call, shown)
