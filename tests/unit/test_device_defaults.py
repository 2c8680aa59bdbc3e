"""What a run does on a GPU by default: precisions, widths, memory; and on which devices functions run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distcse.devices.device import DeviceSpeed, auto_precision
from distcse.devices.device_plan import DeviceOptions, DevicePlan, OwnNode, plan_devices
from distcse.devices.resources import Node
from distcse.errors import ClusterTooSmallError, OutOfMemoryError
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.models.folder import overflows_fp16
from distcse.models.loading import halve_matrices
from distcse.recipe import Recipe, TrainingSection
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.distillation_task import BatchLoader
from distcse.runs.mutual.processes import group_needs, with_precisions
from distcse.teachers.kinds.base import frozen_weight_dtype
from distcse.training.out_of_memory import OutOfMemoryAdvice
from tests.clusters import FixedCluster
from tests.failures import fails_with
from tests.gpusim import simulated
from tests.jobs import make_spec, train
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., Recipe]

H100 = DeviceSpeed("NVIDIA H100", "gpu", frozenset({"bf16", "fp16"}), {})
V100 = DeviceSpeed("NVIDIA V100", "gpu", frozenset({"fp16"}), {})
AMX = DeviceSpeed("Xeon (AMX)", "cpu", frozenset({"bf16", "fp16"}), {"bf16": 6.0, "fp16": 5.0})
AVX2 = DeviceSpeed("EPYC (AVX2)", "cpu", frozenset(), {"bf16": 0.02, "fp16": 0.02})


@pytest.mark.parametrize(
    ("devices", "trained", "teacher", "overflowing"),
    [
        ([H100], "bf16", "fp16", "bf16"),
        ([V100], "fp32", "fp16", "fp32"),
        ([H100, V100], "fp32", "fp16", "fp32"),
        ([AMX], "bf16", "bf16", "bf16"),
        ([AVX2], "fp32", "fp32", "fp32"),
        ([H100, AMX], "bf16", "bf16", "bf16"),
        ([], "fp32", "fp32", "fp32"),
    ],
)
def test_teachers_are_fp16_and_students_bf16_on_gpus(
    devices: list[DeviceSpeed], trained: str, teacher: str, overflowing: str
) -> None:
    assert auto_precision(devices) == trained
    assert auto_precision(devices, is_teacher=True) == teacher
    assert auto_precision(devices, is_teacher=True, overflows_fp16=True) == overflowing


def test_families_that_overflow_fp16_are_known(tiny: Callable[..., Path]) -> None:
    assert overflows_fp16(tiny("t5")) and not overflows_fp16(tiny("bert"))


def test_matrices_alone_are_halved(tiny: Callable[..., Path]) -> None:
    assert frozen_weight_dtype("fp16", "cuda") == torch.float16 and frozen_weight_dtype("fp16", "cpu") == torch.float32
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    halve_matrices(encoder, torch.float16)
    types = {name.split(".")[-2]: weight.dtype for name, weight in encoder.named_parameters()}
    assert types["query"] == types["dense"] == torch.float16
    assert types["LayerNorm"] == types["word_embeddings"] == torch.float32


@pytest.mark.parametrize(("max_length", "widths"), [(16, {8, 16}), (13, {8, 13})])
def test_widths_on_a_gpu_are_multiples_of_8(max_length: int, widths: set[int], shared_recipe: MakeRecipe) -> None:
    spec, _ = make_spec(shared_recipe(f"student.max_length={max_length}"))
    loader = BatchLoader(spec, 0, 1)
    on_cpu = [loader.batch(step, torch.device("cpu"), max_length).streams[0][0] for step in range(8)]
    with simulated():
        on_gpu = [loader.batch(step, torch.device("gpu"), max_length).streams[0][0] for step in range(8)]
        assert {tokens.ids.shape[1] for tokens in on_gpu} <= widths
        for narrow, wide in zip(on_cpu, on_gpu, strict=True):
            ids, mask, length = wide.ids.cpu(), wide.mask.cpu(), narrow.ids.shape[1]
            assert torch.equal(ids[:, :length], narrow.ids) and torch.equal(mask[:, :length], narrow.mask)
            assert not mask[:, length:].any()


def test_widths_are_kept_where_the_loss_counts_padding(shared_recipe: MakeRecipe) -> None:
    counted = "objective.detection={generator: unread, reduction: all}"
    spec, _ = make_spec(shared_recipe("objective.rank=null", "objective.consistency=null", counted))
    loader = BatchLoader(spec, 0, 1)
    narrow = loader.batch(0, torch.device("cpu"), 16).streams[0][0]
    with simulated():
        assert loader.batch(0, torch.device("gpu"), 16).streams[0][0].ids.shape == narrow.ids.shape


def test_a_step_without_memory_says_how_to_continue(shared_recipe: MakeRecipe) -> None:
    """The checkpoint is kept, and the run continues with the gradient cache that the message names."""
    spec, tables = make_spec(shared_recipe("training.max_steps=8", "evaluation.eval_steps=2"))
    with simulated() as gpu:
        with (
            gpu.out_of_memory(at="distcse/training/engines", after=300, times=1000),
            fails_with(OutOfMemoryError, "16 of 16 rows", "training.batch_size=8") as failure,
        ):
            train(spec, tables)
        assert "training.grad_cache_chunk=8" in str(failure.value) and "--resume" in str(failure.value)
        _, recipe = RunDirectory.reopen(spec.run.path, ["training.grad_cache_chunk=8"])
        assert isinstance(recipe, Recipe)
        result = train(type(spec)(**{**vars(spec), "recipe": recipe}), tables)
    assert result.state.finished and (spec.run.path / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"batch_size": 12, "grad_cache_chunk": 6}, "training.grad_cache_chunk=3"),
        ({"batch_size": 12, "grad_cache_chunk": 1}, "start a new run with training.batch_size=6"),
        ({"batch_size": 12, "workers": 3}, "training.workers=6"),
        ({"batch_size": 12, "precision": "fp32"}, "training.precision=bf16"),
        ({"batch_size": 12, "dropout_rng_streams": 2}, "training.dropout_rng_streams=null training.grad_cache_chunk=6"),
        ({"batch_size": 12}, "39.55 GiB allowed"),
    ],
)
def test_the_ways_out_fit_the_recipe(section: dict[str, Any], named: str) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        activations = torch.zeros(3)
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. 39.55 GiB allowed")

    advice = OutOfMemoryAdvice(TrainingSection(**section), "training")
    with fails_with(OutOfMemoryError, named, "Tried to allocate 2.00 GiB") as failure, advice:
        fail()
    assert failure.value.__suppress_context__ and kept[0]() is None, "the error keeps the step's tensors alive"


# -- where functions run -------------------------------------------------------------------------------------------------


GIB = 2.0**30
STUDENTS, TEACHERS = {"role": "students"}, {"role": "teachers"}
BY_ROLE = {"training.node_labels": STUDENTS, "teachers.node_labels": TEACHERS}


def node(cpus: float, gpus: float = 0.0, memory: float = 64.0, name: str = "", **labels: str) -> Node:
    return Node(name, {"CPU": cpus, "memory": memory * GIB, **({"GPU": gpus} if gpus else {})}, labels)


HEAD, OWN = node(0, memory=2, name="own"), node(8, name="own")
GPU, CPU = {"GPU": 1, "memory": 4 * GIB}, {"CPU": 1, "memory": 4 * GIB}
PLANS: dict[str, tuple[DeviceOptions, list[Node], int, DevicePlan | None]] = {
    "this machine": (DeviceOptions(), [OWN], 4, None),
    "this machine with GPUs": (DeviceOptions(), [node(8, 2, name="own")], 4, DevicePlan(2, GPU, None)),
    "fewer functions than GPUs": (DeviceOptions(), [HEAD, node(8, 8)], 3, DevicePlan(3, GPU, None)),
    "a fraction of a GPU": (DeviceOptions(), [node(2, 0.5)], 2, DevicePlan(1, {**GPU, "GPU": 0.5}, None)),
    "parts of a GPU": (
        DeviceOptions(gpus=0.4),
        [node(8, 1), node(8, 0.5)],
        4,
        DevicePlan(3, {**GPU, "GPU": 0.4}, None),
    ),
    "an autoscaler starts nodes": (DeviceOptions(can_wait=True), [node(8, 1)], 4, DevicePlan(4, GPU, None, waiting=3)),
    "none waits without GPUs": (DeviceOptions(can_wait=True), [HEAD, node(8), node(8)], 4, DevicePlan(2, CPU, None)),
    "resources.gpu: none": (DeviceOptions(uses_gpu=False), [HEAD, node(8, 8)], 3, DevicePlan(1, CPU, None)),
    "GPUs of the teachers' nodes only": (
        DeviceOptions(BY_ROLE),
        [node(8, role="students"), node(8, 2, role="teachers")],
        2,
        DevicePlan(2, GPU, TEACHERS),
    ),
    "the teachers' nodes are gone": (
        DeviceOptions(BY_ROLE),
        [HEAD, node(8, 1, role="students")],
        1,
        DevicePlan(1, GPU, STUDENTS),
    ),
    "the students' nodes are gone": (
        DeviceOptions(BY_ROLE, uses_gpu=False),
        [HEAD, node(8, 1, role="teachers")],
        1,
        DevicePlan(1, CPU, TEACHERS),
    ),
    "one process per node without GPUs": (DeviceOptions(), [OWN, node(8), HEAD], 4, DevicePlan(2, CPU, None)),
    "one function fits here": (DeviceOptions(), [OWN, node(8)], 1, None),
    "one function does not fit on a head without CPUs": (DeviceOptions(), [HEAD, node(8)], 1, DevicePlan(1, CPU, None)),
    "one function does not run on another role's node": (
        DeviceOptions(BY_ROLE),
        [node(8, name="own", role="teachers"), node(4, role="students")],
        1,
        DevicePlan(1, CPU, STUDENTS),
    ),
    "no node has the memory, and other jobs may hold some": (
        DeviceOptions(),
        [HEAD, node(8, 1, memory=3)],
        1,
        DevicePlan(1, {"GPU": 1, "memory": 2.25 * GIB}, None),
    ),
    "memory limits the processes of a node": (DeviceOptions(), [node(8, 4, memory=9)], 4, DevicePlan(2, GPU, None)),
    "no process without the memory": (
        DeviceOptions(),
        [node(8, memory=3), node(8), node(8)],
        4,
        DevicePlan(2, CPU, None),
    ),
}


@pytest.mark.parametrize(("options", "nodes", "calls", "expected"), PLANS.values(), ids=PLANS)
def test_devices_of_functions(
    options: DeviceOptions, nodes: list[Node], calls: int, expected: DevicePlan | None
) -> None:
    assert plan_devices(options, nodes, OwnNode("own", 16 * GIB), calls, 4 * GIB) == expected


@pytest.mark.parametrize(
    ("nodes", "calls", "threads"),
    [
        ([node(8, 8)], 3, [2]),
        ([node(8, 2)], 4, [4]),
        ([node(8, 4, memory=9)], 4, [4]),
        ([node(8, 8), node(64, 1)], 4, [2, 64]),
        ([node(4, 8)], 8, [1]),
        ([HEAD, node(8), node(64)], 4, [1, 8, 64]),
    ],
)
def test_processes_share_the_threads_of_their_node(nodes: list[Node], calls: int, threads: list[int]) -> None:
    plan = plan_devices(DeviceOptions(), nodes, OwnNode("own", 16 * GIB), calls, 4 * GIB)
    assert plan is not None and [plan.threads_on(node.resources) for node in nodes] == threads


def test_a_process_without_the_memory_starts_another() -> None:
    nodes = [OWN, node(8)]
    plan = plan_devices(DeviceOptions(), nodes, OwnNode("own", 3 * GIB), 1, 4 * GIB)
    assert plan is not None and plan.number == 1


def test_nodes_of_dropped_groups_are_not_needed(
    tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    """The second group was dropped, and its nodes are gone."""
    models = {"one": tiny("bert"), "two": tiny("bert")}
    labels = [f"groups.{number}.node_labels={{role: {role}}}" for number, role in enumerate(("a", "b"))]
    recipe = make_mutual_recipe(tmp_path, models, sentences, "ray=true", "bi.precision=bf16", *labels)
    found = group_needs(recipe, recipe.groups[:1]).options()
    assert found.labels == {"groups.0.node_labels": {"role": "a"}} and "groups.1.backbone" not in found.read
    assert group_needs(recipe, recipe.groups[1:]).options().labels == {"groups.1.node_labels": {"role": "b"}}
    cluster = FixedCluster([node(4, role="a")])
    assert with_precisions(recipe, cluster, Reporter(), groups=recipe.groups[:1]) == recipe
    with fails_with(ClusterTooSmallError, "groups.1.node_labels"):
        with_precisions(recipe, cluster, Reporter())


def test_labels_that_no_node_has_are_named() -> None:
    named = ("role=students of training.node_labels or role=teachers of teachers.node_labels", "ray start --labels")
    with fails_with(ClusterTooSmallError, *named):
        plan_devices(DeviceOptions(BY_ROLE), [node(1, role="others")], OwnNode("own", GIB), 1, GIB)
