"""Settings that work and probably do not do what is meant: run and dry run report the same lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distcse.api import evaluate
from distcse.errors import CorpusTooSmallError, SearchSpaceError, StoppedEarlyError
from distcse.evaluation import LoadOptions
from distcse.events import Event, LogMessage, Reporter, StageProgress
from distcse.models import Encoder, TokenizerSpec
from distcse.preflight.warnings import (
    SettingsWarning,
    warn_of_curve,
    warn_of_cut_rows,
    warn_of_few_steps,
    warn_of_narrow_bands,
    warn_of_places,
)
from distcse.recipe import (
    FamilyRecipe,
    Recipe,
    Sweep,
    load_recipe,
    packaged_recipes,
    read_recipe,
    read_sweep,
    recipe_yaml,
    with_values,
)
from distcse.recipe.section import settings_without_effect, unread_keys
from distcse.recipe.training import TrainingSection
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.corpus import extent_of, fit_to_corpus, model_warnings
from distcse.runs.distillation.experiment import Distillation, DistillationTrials
from distcse.runs.distillation.preflight import embed_corpus
from distcse.runs.experiment import experiment_of
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.storage import open_store
from distcse.teachers.table import SAMPLE, EmbeddingTable, TableIdentity, VectorStatistics, table_statistics
from distcse.text import Corpus
from distcse.tuning.space import Space
from distcse.tuning.sweep import begin, reopen
from tests.commands import command
from tests.failures import fails_with
from tests.jobs import embed_tables, make_recipe
from tests.models import change_json
from tests.pairs import make_mutual_recipe

doctor = command("doctor")
plan = command("plan")

MakeRecipe = Callable[..., Recipe]

SHORT = ("training.max_steps=2", "evaluation.eval_steps=2", "evaluation.final_suites=[]")


def codes(warnings: list[SettingsWarning]) -> list[str]:
    return [warning.code for warning in warnings]


def reported(code: str, work: Callable[[Reporter], object]) -> list[str]:
    """Return the warnings of a kind, such as `W10`, that work reports."""
    events: list[Event] = []
    work(Reporter(events.append))
    texts = [event.text for event in events if isinstance(event, LogMessage) and event.warning]
    return [text for text in texts if text.startswith(f"[DCSE-{code}")]


@pytest.mark.slow
def test_a_dry_run_reports_the_warnings_of_a_run_and_plan_and_doctor_those_without_text(
    tiny: Callable[..., Path], sentences: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All warnings from before the training apply, once the teachers have embedded the corpus."""

    def lines(work: Callable[[Reporter], object]) -> list[str]:
        return [line for line in reported("W", work) if "DCSE-W11" not in line]  # of two steps' curve

    (folder := tmp_path / "session_2026-11-26_06-49-30_123456_7890").mkdir()
    student = shutil.copytree(tiny("bert", dropout=0.0), tmp_path / "student")
    prompted = shutil.copytree(tiny("bert"), tmp_path / "prompted")
    change_json(prompted / "config_sentence_transformers.json", prompts={"query": "query: ", "passage": "passage: "})
    overrides = (*SHORT, "student.max_length=4", "corpus.split=test")
    recipe = make_recipe(folder, student, [prompted, tiny("minilm")], sentences, *overrides)
    backend, experiment = LocalBackend(), Distillation(recipe)
    first = lines(lambda reporter: experiment.run(backend, reporter))
    assert [line[6:9] for line in first] == ["W03", "W03", "W09", "W01", "W04", "W05", "W06"]
    _, table = embed_tables(recipe)
    for shard in range(table.identity.shards):  # the vectors move close together
        vectors = table.vectors(np.asarray(table.shard_range(shard)))
        table.write_shard(shard, vectors * 0.1 + np.eye(vectors.shape[1], dtype=np.float32)[0])
    (statistics := table.directory / "statistics.json").unlink()
    dry = lines(lambda reporter: experiment.check(backend, reporter))
    assert not statistics.exists()
    run = lines(lambda reporter: experiment.run(backend, reporter))
    assert statistics.exists()
    assert dry == run and [line[1:9] for line in run] == [*(line[1:9] for line in first), "DCSE-W02"]
    file = tmp_path / "all.yaml"
    file.write_text(recipe_yaml(recipe))
    doctor([str(file), "--json"])
    checks = json.loads(capsys.readouterr().out)
    without_text = [line for line in run if line[6:9] in ("W01", "W03", "W04", "W09")]
    assert [f"{check['found']}; {check['fix']}" for check in checks if check["name"] == "settings"] == without_text
    assert all(check["verdict"] == "warn" for check in checks if check["name"] == "settings")
    assert plan([str(file)]) == 0
    planned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert planned == [f"warning    {line}" for line in without_text]


def test_text_that_tokenizers_do_not_know_is_warned_of(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Word pieces of English in Amharic text; a byte-level tokenizer knows every text."""
    lines = [f"ሰላም ነው {'ቤት ' * (number % 7)}ልጅ {'መጽሐፍ ' * (number % 11)}" for number in range(100)]
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], lines, *SHORT)
    backend, models = LocalBackend(), {"a": str(tiny("bert")), "b": str(tiny("roberta"))}
    texts, options = tmp_path / "corpus.txt", LoadOptions(pooling="mean", max_length=16)

    student, teacher = reported("W10", lambda reporter: Distillation(recipe).check(backend, reporter))
    assert "100% of the text's tokens" in student and "of student," in student and "of teacher 0," in teacher
    assert reported("W10", lambda reporter: embed_corpus(recipe, backend, reporter)) == [teacher]
    (line,) = reported(
        "W10", lambda r: evaluate(models, texts=texts, load_options=options, dry_run=True, listen=r.emit)
    )
    assert "of a, which" in line


INFO_NCE, CONSISTENCY = "objective.info_nce", "objective.consistency"
GENERATOR = ("objective.rank=null", "student.dropout=0.1", "objective.detection.generator={model}")
"""The student's folder is the generator's too."""


@pytest.mark.parametrize(
    ("dropout", "overrides", "named"),
    [
        (0.0, (), f"{INFO_NCE} and {CONSISTENCY}"),
        (0.0, (f"{CONSISTENCY}=null",), f"{INFO_NCE} compares"),
        (0.0, (f"{INFO_NCE}.weight=0", f"{CONSISTENCY}=null"), ""),
        (0.0, ("student.dropout=0.1",), ""),
        (0.1, (), ""),
        (0.1, ("student.dropout=0",), f"{INFO_NCE} and {CONSISTENCY}"),
        (0.0, GENERATOR, "generator_dropout"),
        (0.1, GENERATOR, ""),
        (0.0, (*GENERATOR, "objective.detection.generator_dropout=false"), ""),
        (0.0, (*GENERATOR, "objective.detection.weight=0"), ""),
    ],
)
def test_missing_dropout_is_warned_of_where_a_loss_relies_on_it(
    dropout: float, overrides: tuple[str, ...], named: str, tiny: Callable[..., Path], recipe_with: MakeRecipe
) -> None:
    model = tiny("bert", dropout=dropout)
    given = [override.format(model=model) for override in overrides]
    found = model_warnings(recipe_with(f"student.backbone={model}", *given))
    assert codes(found) == ["DCSE-W01"] * bool(named)
    key = "generator_dropout" if "generator" in named else "student.dropout"
    assert all(named in warning.problem and key in warning.fix for warning in found)


@pytest.mark.parametrize("key", ["student", "teachers.encoders.0"])
def test_a_model_without_the_prompt_that_its_folder_names_is_warned_of(
    key: str, tiny: Callable[..., Path], tmp_path: Path, recipe_with: MakeRecipe
) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    recipe = recipe_with(f"{key}.backbone={folder}")
    both = {"query": "query: ", "passage": "passage: "}
    cases: list[tuple[dict[str, object], str, bool]] = [
        ({"prompts": both, "default_prompt_name": None}, "", True),
        ({"prompts": {**both, "document": ""}}, "", True),
        ({"prompts": {"query": "", "document": "", "search": "search: ", "passage": "passage: "}}, "", True),
        ({"prompts": {**both, "title": ""}}, "", False),
        ({"prompts": both}, "query: ", False),
        ({"prompts": {"query": "query: "}, "default_prompt_name": "query"}, "", False),
        ({"prompts": {"query": "Instruct: find\nQuery:", "document": ""}}, "", False),
        ({"prompts": None}, "", False),
    ]
    for settings, prompt, warns in cases:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
        found = model_warnings(with_values(recipe, {f"{key}.prompt": prompt}))
        assert codes(found) == ["DCSE-W04"] * warns, settings
        for warning in found:
            assert "passage: 'passage: '" in warning.problem and f"{key}.prompt" in warning.fix


def test_an_evaluation_without_the_prompt_that_a_folder_names_is_warned_of(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    theirs, texts = shutil.copytree(tiny("bert"), tmp_path / "theirs"), tmp_path / "texts.txt"
    prompts = {"query": "query: ", "document": "", "passage": "p: "}
    change_json(theirs / "config_sentence_transformers.json", prompts=prompts)
    Encoder.load(theirs, pooling="mean").save(tmp_path / "ours")  # which reads texts as it was trained
    texts.write_text("\n".join(sentences[:20]))

    def warned(prompt: str) -> list[str]:
        models, options = [str(theirs), str(tmp_path / "ours")], LoadOptions(pooling="mean", prompt=prompt)
        return reported(
            "W04", lambda r: evaluate(models, texts=texts, load_options=options, dry_run=True, listen=r.emit)
        )

    (line,) = warned("")
    assert "theirs reads texts without a prompt" in line and "--prompt theirs='query: '" in line
    assert not warned("query: ")


def test_groups_of_a_mutual_distillation_are_warned_of(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    folder = shutil.copytree(tiny("bert"), tmp_path / "model")
    change_json(folder / "config_sentence_transformers.json", prompts={"query": "query: "})
    recipe = make_mutual_recipe(tmp_path, {"one": folder, "two": tiny("minilm")}, sentences)
    (warning,) = MutualDistillation(recipe).settings_warnings()
    assert warning.code == "DCSE-W04" and "groups.0.prompt" in warning.fix


@pytest.mark.parametrize(
    ("override", "warning"),
    [
        ("objective.rank={form: list_mle, tau3: 0.1}", "objective.rank.tau3 * form is list_mle"),
        ("objective.rank.eps=1e-7", "objective.rank.eps * form is list_net"),
        ("teachers.encoders.0.num_references=50", "teachers.encoders.0.num_references * similarity"),
        ("teachers.num_servers=3", "teachers.num_servers * training.workers is 0"),
        ("corpus.split=test", "corpus.split * dataset is null"),
        ("evaluation.dev_is_test=true", "evaluation.dev_is_test * evaluation.data is null"),
        (
            "objective={info_nce: null, consistency: null, rank: {form: list_net}, tau1: 0.1}",
            "objective.tau1 * info_nce and consistency are null",
        ),
        (
            "teachers.encoders=[{backbone: name, pooling: cls, endpoint: {url: 'http://host/v1'}}]",
            "teachers.encoders.0.pooling * endpoint gives the vectors, and no model is loaded",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_warned_of(override: str, warning: str, recipe_with: MakeRecipe) -> None:
    found = experiment_of(recipe_with(override)).settings_warnings(only_local=True)
    (problem,) = (about.problem for about in found if about.code == "DCSE-W09")
    assert problem.startswith(warning.replace("*", "is set and has no effect:"))


def test_a_cross_encoder_reads_no_pooling_and_packaged_recipes_have_no_setting_that_nothing_reads(
    recipe_with: MakeRecipe, tiny_cross: Path
) -> None:
    recipe = recipe_with(f"teachers.encoders.1.backbone={tiny_cross}")
    assert "teachers.encoders.1.pooling" in experiment_of(recipe).unread_keys()
    for name in packaged_recipes():
        recipe = read_recipe(name, ["evaluation.data=data"])
        assert settings_without_effect(recipe, unread_keys(recipe)) == [], name
    weighted = read_recipe("search-reranker", ["corpus.sources.0.weight=0.5", "evaluation.data=data"])
    (line,) = settings_without_effect(weighted, unread_keys(weighted))
    assert line.startswith("corpus.sources.0.weight is set and has no effect: objective.candidates")


def test_a_space_does_not_search_what_nothing_reads(recipe_with: MakeRecipe) -> None:
    """A space of ListNet on a recipe of ListMLE would run equal trials; a space that also searches the form would not."""
    list_mle = recipe_with("objective.rank={form: list_mle}")
    tau3 = {"objective.rank.tau3": {"uniform": [0.01, 0.1]}}
    form = {"objective.rank.form": {"values": ["list_mle", "list_net"]}}
    Space(Sweep.model_validate({"parameters": tau3}), recipe_with())
    Space(Sweep.model_validate({"parameters": {**tau3, **form}}), list_mle)
    with fails_with(SearchSpaceError, "parameters.objective.rank.tau3 has no effect: form is list_mle; remove"):
        Space(Sweep.model_validate({"parameters": tau3}), list_mle)


def test_storage_in_the_folder_of_a_ray_session_is_warned_of(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    session = tmp_path / "ray" / "session_2026-11-26_06-49-30_123456_7890"
    (session / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(session)
    for runs, warns in (
        (session / "runs", True),
        (tmp_path / "session_latest" / "runs", True),
        (tmp_path / "session_of_tuesday", False),
        ("s3://bucket/session_2026-11-26_06-49-30_123456_7890", False),
    ):
        assert codes(warn_of_places(recipe_with(f"storage.runs={runs}"))) == ["DCSE-W03"] * warns


def test_statistics_are_measured_on_a_sample_and_kept(tmp_path: Path) -> None:
    identity = TableIdentity("model", "corpus", 4000, "mean", 16, "", "fp32", shard_rows=100)
    table = EmbeddingTable.locate(open_store(tmp_path), identity)
    assert table_statistics(table) is None
    random = np.random.default_rng(0)
    offset = np.eye(64, dtype=np.float32)[0] * 8
    for shard in range(identity.shards):
        table.write_shard(shard, random.standard_normal((100, 64)).astype(np.float32) + offset)
    found = table_statistics(table, keep=True)
    assert found is not None and 1000 < SAMPLE < identity.rows
    vectors = table.vectors(np.arange(0, 4000, 4))
    cosines = (vectors @ vectors.T)[np.triu_indices(1000, 1)]
    assert found.mean == pytest.approx(cosines.mean(), abs=0.01)
    assert found.spread == pytest.approx(cosines.std(), rel=0.1)
    assert 50 < found.effective_rank < 64  # 63 directions of about equal variance, estimated from a sample
    for shard in range(identity.shards):
        table.write_shard(shard, -random.standard_normal((100, 64)).astype(np.float32))
    assert table_statistics(EmbeddingTable.locate(open_store(tmp_path), identity)) == found  # not measured again
    stored = table.directory / "statistics.json"
    stored.write_text(stored.read_text().replace("mean", "moan"))
    again = table_statistics(EmbeddingTable.locate(open_store(tmp_path), identity))
    assert again is not None and again != found


@pytest.mark.parametrize(
    ("spreads", "alphas", "named"),
    [
        ((0.09, 0.085), (1, 1), {}),
        ((0.026, 0.08, 0.1), (1, 1, 1), {0: "13% in effect, not 33%"}),
        ((0.09, 0.02), (1, 9), {1: "67% in effect, not 90%"}),
        ((0.02,), (1,), {}),
    ],
)
def test_a_teacher_with_a_narrow_band_is_named_with_what_it_weighs(
    spreads: tuple[float, ...], alphas: tuple[float, ...], named: dict[int, str], recipe_with: MakeRecipe
) -> None:
    teachers = ", ".join(f"{{backbone: name, pooling: cls, alpha: {alpha}}}" for alpha in alphas)
    recipe = recipe_with(f"teachers.encoders=[{teachers}]")
    statistics = {number: VectorStatistics(0.5, spread, 100) for number, spread in enumerate(spreads)}
    found = warn_of_narrow_bands(recipe, statistics)
    assert len(found) == len(named)
    for warning, (number, text) in zip(found, named.items(), strict=True):
        assert text in warning.problem and f"teacher {number}," in warning.problem
        assert f"teachers.encoders.{number}.alpha" in warning.fix


def test_the_extent_counts_steps_and_rows_that_are_cut(recipe_with: MakeRecipe) -> None:
    recipe = recipe_with("training.epochs=2.5", "student.max_length=9")
    corpus = Corpus.prepare(recipe.corpus, open_store(recipe.storage.cache))
    (note, _), tokenizer = extent_of(recipe, corpus), TokenizerSpec.of(recipe.student).tokenizer
    lengths = [len(tokenizer(text)["input_ids"]) for text in corpus.texts(range(len(corpus)))]
    cut_share = np.mean([length > 9 for length in lengths])
    assert 0 < cut_share < 1 and note.startswith("55 steps of ") and ", 22 per epoch; " in note
    assert f"; {cut_share:.0%} of the rows have more than 9 tokens" in note


@pytest.mark.parametrize(
    ("rows", "overrides", "expected"),
    [
        (5121, [], (512, 128)),
        (2000, [], (200, 128)),
        (40, [], (4, 3)),
        (300, ["training.epochs=20"], (30, 128)),
        (300, ["training.max_steps=3"], (30, 27)),
        (40, ["training.workers=2", "training.min_workers=1"], (4, 2)),
        (2000, ["evaluation.num_heldout=1000"], (1000, 100)),
        (300, ["training.batch_size=256", "evaluation={num_heldout: 20}"], (20, 256)),
        (300, ["training={engine: torch, epochs: 1}"], (30, 27)),
        (4, [], "at least 5: 3 to hold out (evaluation.num_heldout), and a batch of 2 (training.batch_size)"),
        (300, ["training.batch_size=290"], "at least 320: 30 to hold out"),
        (300, ["evaluation.num_heldout=400"], "at least 402"),
    ],
)
def test_defaults_follow_a_small_corpus(rows: int, overrides: list[str], expected: tuple[int, int] | str) -> None:
    """A packaged recipe's values are defaults; a user's are kept, or refused in one message."""
    recipe = with_values(load_recipe("minilm-3layer", overrides), {"seed": 7})
    if isinstance(expected, str):
        with fails_with(CorpusTooSmallError, f"the corpus has {rows} rows", expected):
            fit_to_corpus(recipe, rows, Reporter())
        return
    events: list[Event] = []
    fitted = fit_to_corpus(recipe, rows, Reporter(events.append))
    assert (fitted.evaluation.num_heldout, fitted.training.batch_size) == expected
    assert len(events) == (fitted != recipe)
    assert fit_to_corpus(fitted, rows, Reporter()) == fitted


def test_a_file_of_yours_gives_values_and_the_packaged_recipe_that_it_extends_does_not(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: three-teachers-family\nevaluation: {num_heldout: 20}\n")
    recipe = read_recipe(str(file))
    assert isinstance(recipe, FamilyRecipe)
    student = recipe.student_recipe(recipe.largest_first[0].model_copy(update={"layers": [0]}))
    assert recipe.given_keys == student.given_keys == {("evaluation", "num_heldout")}


def test_a_run_keeps_the_values_that_it_lowered(recipe_with: MakeRecipe) -> None:
    """Also one that was stopped before its text was read; the run reports its extent, and warnings of its curve."""
    evaluation = ("evaluation.final_suites=[]", "evaluation.eval_steps=4")
    recipe = recipe_with("corpus.limit=40", "training.lr=0.1", *evaluation).with_given_keys([])
    with pytest.raises(StoppedEarlyError):
        Distillation(recipe).run(LocalBackend(), Reporter(stop_requested=lambda: True))
    (folder,) = Path(recipe.storage.runs).iterdir()
    directory, begun = RunDirectory.reopen(folder, [])
    assert isinstance(begun, Recipe)
    events: list[Event] = []
    result = Distillation(begun).run(LocalBackend(), Reporter(events.append), directory)
    _, stored = RunDirectory.reopen(folder, [])
    assert isinstance(stored, Recipe) and stored == result.recipe
    assert (stored.evaluation.num_heldout, stored.training.batch_size) == (4, 3) and result.train_result.steps == 12
    (steps,) = (event.note for event in events if isinstance(event, StageProgress) and event.name == "steps")
    assert steps.startswith("12 steps of 3, 12 per epoch; ") and "of the rows have more than 16 tokens" in steps
    curve = [warning.text for warning in warn_of_curve(result.train_result.state.scores, 12, stored.training)]
    texts = [event.text for event in events if isinstance(event, LogMessage)]
    assert [text for text in texts if "[DCSE-W07]" in text or "[DCSE-W11]" in text] == curve != []


def test_a_sweep_lowers_the_defaults_once_and_a_resumed_one_keeps_them(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("parameters:\n  training.lr: {values: [1e-4, 1e-3]}\n")
    given = {("evaluation", "num_heldout")}
    recipe = recipe_with("corpus.limit=40", "evaluation.num_heldout=8").with_given_keys(given)
    folder = begin(recipe, read_sweep(str(tmp_path / "space.yaml")))
    stored, _ = reopen(folder, recipe.given_keys)
    assert isinstance(stored, Recipe) and stored.given_keys == given
    DistillationTrials(stored).prepare(LocalBackend(), Reporter(), RunDirectory(folder))
    resumed, _ = reopen(folder)
    assert isinstance(resumed, Recipe)
    assert (resumed.evaluation.num_heldout, resumed.training.batch_size) == (8, 3)
    assert fit_to_corpus(resumed, 40, Reporter()) == resumed


RISING = [(0, 40.0), (50, 84.0), (100, 87.0), (150, 88.6), (152, 88.6)]
START = (0, 46.64)


def curve(scores: list[tuple[int, float]], **training: Any) -> tuple[list[tuple[int, float]], int, TrainingSection]:
    return scores, 152, TrainingSection(**training)


@pytest.mark.parametrize(
    ("warn", "arguments", "code", "words"),
    [
        (warn_of_few_steps, (99, 22, None), "W05", "99 steps … training.epochs=5, or give more text"),
        (warn_of_few_steps, (12, 22, 12), "W05", "training.max_steps=null, and if needed training.epochs=5"),
        (warn_of_few_steps, (99, 22, 200), "W05", "write training.epochs=5"),
        (warn_of_few_steps, (100, 22, 12), "", ""),
        (warn_of_cut_rows, (0.62, 32), "W06", "62% of the rows … student.max_length"),
        (warn_of_cut_rows, (0.37, 32), "", "as many as in runs that were measured"),
        (warn_of_curve, curve(RISING, epochs=1.5), "W07", "1.60 from step 100 to 152 … training.epochs=3"),
        (warn_of_curve, curve(RISING, max_steps=152), "W07", "training.max_steps=304"),
        (warn_of_curve, curve([*RISING[:3], (152, 87.2)]), "", "within the noise between seeds"),
        (warn_of_curve, curve([*RISING[:2], (100, 89.0), (152, 88.6)]), "", "falls"),
        (warn_of_curve, curve([*RISING[:3], (110, 89.0), (114, 87.0), (152, 88.6)]), "", "was higher"),
        (warn_of_curve, curve([(0, 40.0), (152, 88.6)]), "", "nothing to compare the end with"),
        (warn_of_curve, curve([]), "", ""),
        (warn_of_curve, curve([START, (5, 0.45), (25, -1.09)], lr=0.06), "W11", "46.64 … .lr (0.02)"),
        (warn_of_curve, curve([START, (5, 46.64)]), "W11", "46.64"),  # the start wins a tie
        (warn_of_curve, curve([START, (5, 47.0), (25, -1.09)]), "", "has gained"),
        (warn_of_curve, curve([START]), "", "has not been trained"),
    ],
)
def test_few_steps_cut_rows_and_curves_are_warned_of(
    warn: Callable[..., list[SettingsWarning]], arguments: tuple[Any, ...], code: str, words: str
) -> None:
    found = warn(*arguments)
    assert codes(found) == ([f"DCSE-{code}"] if code else [])
    for warning in found:
        assert all(part in warning.text for part in words.split(" … "))
