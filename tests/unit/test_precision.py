"""`precision: auto`: which precision is selected on which device; that it is reported and stored; warnings of slow precisions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import distcse
from distcse.devices.cluster import ClusterSpeeds
from distcse.devices.device import MIN_SPEEDUP, DeviceSpeed, auto_precision, cpu_speed
from distcse.devices.resources import Node
from distcse.events import Event, LogMessage, Reporter, StageProgress
from distcse.planning import planner
from distcse.planning.machines import parse_cluster
from distcse.preflight import machine
from distcse.preflight.precision import Role, report_precisions
from distcse.recipe import Recipe, read_recipe, with_values
from distcse.runs.distillation.processes import with_precisions, with_teacher_precisions
from distcse.runs.experiment import experiment_of
from tests.clusters import FixedCluster
from tests.conftest import ROOT
from tests.hub import run_hub

MakeRecipe = Callable[..., Recipe]

FAST = DeviceSpeed("Xeon (AMX)", "cpu", frozenset({"bf16"}), {"bf16": 6.0, "fp16": 0.3})
SLOW = DeviceSpeed("EPYC (AVX2)", "cpu", frozenset(), {"bf16": 0.018, "fp16": 0.02})
EMULATED = DeviceSpeed("Xeon (AVX512)", "cpu", frozenset({"bf16"}), {"bf16": 0.4, "fp16": 0.2})
ARM = DeviceSpeed("arm64 (DEFAULT)", "cpu", frozenset(), {"bf16": 1.9, "fp16": 1.8})
A100 = DeviceSpeed("NVIDIA A100", "gpu", frozenset({"bf16", "fp16"}), {})
V100 = DeviceSpeed("NVIDIA V100", "gpu", frozenset({"fp16"}), {})


@pytest.mark.parametrize(
    ("devices", "chosen"),
    [
        ([FAST], "bf16"),
        ([A100], "bf16"),
        ([SLOW], "fp32"),
        ([EMULATED], "fp32"),
        ([ARM], "fp32"),
        ([V100], "fp32"),
        ([FAST, FAST, SLOW], "fp32"),
        ([A100, V100], "fp32"),
        ([], "fp32"),
    ],
)
def test_auto_is_bf16_if_every_device_of_the_role_is_fast_at_it(devices: list[DeviceSpeed], chosen: str) -> None:
    assert Role("student", "training.precision", "auto", devices).precision == chosen


def test_a_requested_precision_is_kept_and_warned_of_if_slow() -> None:
    events: list[Event] = []
    roles = [
        Role("student", "training.precision", "bf16", [SLOW, FAST]),
        Role("teacher 0", "teachers.encoders.0.precision", "bf16", [SLOW]),
        Role("teacher 1", "teachers.encoders.1.precision", "fp16", [SLOW]),
        Role("evaluation", "evaluation.precision", "auto", [SLOW]),
    ]
    report_precisions(roles, events.append)
    (stage,) = (event for event in events if isinstance(event, StageProgress))
    assert stage.note.startswith("bf16: student, teacher 0; fp16: teacher 1; fp32: evaluation (")
    warning_bf16, warning_fp16 = (event.text for event in events if isinstance(event, LogMessage) and event.warning)
    assert (
        warning_bf16.startswith("training.precision, teachers.encoders.0.precision: bf16") and "0.018x" in warning_bf16
    )
    assert warning_fp16.startswith("teachers.encoders.1.precision: fp16") and "0.02x" in warning_fp16


def test_nodes_of_one_name_are_reported_once_and_nothing_if_all_roles_request_fp32() -> None:
    events: list[Event] = []
    report_precisions([Role("student", "training.precision", "fp32", [FAST])], events.append)
    assert not events
    nodes = [DeviceSpeed("EPYC", "cpu", frozenset({"bf16"}), {"bf16": 2.0 + n / 10}) for n in range(5)]
    report_precisions([Role("student", "training.precision", "auto", nodes)], events.append)
    assert [event.note for event in events if isinstance(event, StageProgress)] == [
        "bf16: student (EPYC: bf16 products 2x as fast as fp32)"
    ]


def test_bf16_is_selected_on_a_cpu_with_its_units_alone() -> None:
    """`make test-slow` runs this file with kernels for AVX2 too."""
    has_units = torch.cpu._is_avx512_bf16_supported() and "ONEDNN_MAX_CPU_ISA" not in os.environ
    speed = cpu_speed()
    assert auto_precision([speed]) == ("bf16" if has_units else "fp32")
    assert has_units == (speed.speedups["bf16"] >= MIN_SPEEDUP)


def test_a_run_stores_its_precisions(recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine might select other ones; a resumed or repeated run uses the stored ones."""
    auto = {"training.precision": "auto", "teachers.encoders.0.precision": "auto", "evaluation.precision": "auto"}
    recipe = with_values(recipe_with("training.max_steps=2", "evaluation.final_suites=[]"), auto)
    monkeypatch.setattr("distcse.runs.cluster_fit.local_speed", lambda: SLOW)
    events: list[Event] = []
    first = distcse.run(recipe, listen=events.append)
    (note,) = (event.note for event in events if isinstance(event, StageProgress) and event.name == "precision")
    assert note.startswith("fp32: student, teacher 0, teacher 1, evaluation (EPYC (AVX2): bf16 products 0.018x")
    stored = read_recipe(str(first.directory / "recipe.yaml"))
    assert isinstance(stored, Recipe)
    assert [stored.training.precision, stored.evaluation.precision] == ["fp32", "fp32"]
    monkeypatch.setattr("distcse.runs.cluster_fit.local_speed", lambda: FAST)
    repeated = distcse.rerun(first.directory, listen=events.append)
    assert repeated.compared is not None and "equal" in repeated.compared.description
    stored = read_recipe(str(repeated.directory / "recipe.yaml"))
    assert isinstance(stored, Recipe) and stored.training.precision == "fp32"


def test_an_embedding_pass_checks_only_its_teachers_devices(recipe_with: MakeRecipe) -> None:
    """It also works on a cluster that is too small for the training workers, because nothing is trained."""
    recipe = with_values(recipe_with("training.workers=4"), {"teachers.encoders.1.precision": "auto"})
    nodes = [Node("teachers", {"CPU": 1.0}, {})]
    cluster = FixedCluster(nodes, ClusterSpeeds([(nodes[0], [FAST])]))
    events: list[Event] = []
    decided = with_teacher_precisions(recipe, cluster, Reporter(events.append))
    assert [teacher.precision for teacher in decided.teachers.encoders] == ["fp32", "bf16"]
    assert [event.note for event in events if isinstance(event, StageProgress)] == [
        "fp32: teacher 0; bf16: teacher 1 (Xeon (AMX): bf16 products 6x as fast as fp32)"
    ]


def test_plan_and_doctor_select_the_same_precision_as_a_run(
    recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_values(recipe_with(), {"training.precision": "auto"})
    for device, chosen in ((SLOW, "fp32"), (FAST, "bf16")):
        for module in ("distcse.planning.planner", "distcse.runs.cluster_fit"):
            monkeypatch.setattr(f"{module}.local_speed", lambda device=device: device)
        planned = planner.with_precisions(recipe, parse_cluster("local"))
        assert isinstance(planned, Recipe) and planned.training.precision == chosen
        decided_here = with_precisions(recipe, None, Reporter())
        assert decided_here.training.precision == chosen and decided_here.evaluation.precision == "fp32"
        check = machine.check_precision(experiment_of(recipe).precision_roles([device]))
        assert check.verdict == "ok" and f"{chosen}: student" in check.found
    for cluster, chosen in (("8xA100-40G", "bf16"), ("8xV100-32G", "fp32")):
        planned = planner.with_precisions(recipe, parse_cluster(cluster))
        assert isinstance(planned, Recipe) and planned.training.precision == chosen
    in_bf16 = experiment_of(with_values(recipe, {"training.precision": "bf16"}))
    check = machine.check_precision(in_bf16.precision_roles([SLOW]))
    assert check.verdict == "warn" and "training.precision" in check.fix


FIRST_AND_LATER = """
import sys
import distcse.runs.cluster_fit as cluster_fit
import distcse.runs.distillation.processes as roles
from distcse.devices.device import DeviceSpeed
from distcse.events import Reporter
from distcse.models import resolve_model
from distcse.recipe import load_recipe
cluster_fit.local_speed = lambda: DeviceSpeed("NVIDIA A100", "gpu", frozenset({"bf16", "fp16"}), {})
teachers = ", ".join(f"{{backbone: me/{family}, precision: auto}}" for family in ("t5", "bert"))
recipe = load_recipe(sys.argv[1], [f"teachers.encoders=[{teachers}]"])
def decide(decision):
    print(*(teacher.precision for teacher in decision(recipe, None, Reporter()).teachers.encoders))
decide(roles.with_precisions)
decide(roles.with_teacher_precisions)
resolve_model("me/t5"), resolve_model("me/bert")
decide(roles.with_precisions)
"""


def test_the_family_of_a_hub_teacher_is_read_before_its_download(
    recipe_with: MakeRecipe, tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    recipe_with()
    with run_hub() as hub:
        for family in ("t5", "bert"):
            files = [file for file in tiny(family).iterdir() if file.is_file()]
            hub.models[f"me/{family}"] = {file.name: file.read_bytes() for file in files}
            hub.private[f"me/{family}"] = False
        done = subprocess.run(
            [sys.executable, "-c", FIRST_AND_LATER, str(tmp_path / "recipe.yaml")],
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
                "HF_HOME": str(tmp_path / "hub"),
                "HF_ENDPOINT": hub.url,
                "PYTHONPATH": str(ROOT),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["bf16 fp16"] * 3
    fetched = [path.rpartition("/")[2] for path in hub.requested_paths if "/resolve/" in path]
    weights = fetched.index("model.safetensors")
    assert fetched[:weights].count("config.json") >= 2, "both are read before any weights"
