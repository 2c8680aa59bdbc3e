"""Resolves `--cluster` to machines with their rates, as a recipe would use them."""

from __future__ import annotations

from pathlib import Path

from distcse.device import DeviceSpeed, local_speed
from distcse.experiments.registry import experiment_of
from distcse.planning.calibration import calibrate, this_machine
from distcse.planning.machines import GPUS, Cluster
from distcse.planning.planner import Form
from distcse.planning.registry import planner_of
from distcse.precision import decide_precisions
from distcse.recipe import BaseRecipe
from distcse.storage import resolve_path


def open_cluster(spec: str, form: Form, recipe: BaseRecipe, network: float) -> Cluster:
    """Return the cluster that the user described, with data-sheet rates or with this machine's calibrated rates.

    Args:
        spec: The value of `--cluster`.
        form: (nodes, devices per node, kind of device), from `parse_cluster`.
        recipe: Gives the workers per machine and the cache folder.
        network: Bytes per second in and out of a node.
    """
    nodes, per_node, kind = form
    if kind in GPUS:
        return Cluster(spec, nodes, per_node, GPUS[kind], network)
    planner = planner_of(recipe)
    threads = planner.threads(form)
    machine = this_machine(resolve_path(recipe.storage.cache), threads)
    if kind == "local":
        per_node = planner.workers_on_this_machine(threads)
    return Cluster(spec, nodes, per_node, machine, network)


def with_precisions(recipe: BaseRecipe, form: Form) -> BaseRecipe:
    """Return the recipe with every `precision: auto` decided as a run on such machines would decide it.

    Args:
        recipe: The recipe.
        form: (nodes, devices per node, kind of device), from `parse_cluster`.
    """
    sheet = GPUS.get(form[2])
    supported = frozenset({"fp16"} | ({"bf16"} if sheet is not None and "bf16" in sheet.matmul else set()))
    devices = [local_speed() if sheet is None else DeviceSpeed(sheet.name, "gpu", supported, {})]
    return decide_precisions(recipe, experiment_of(recipe).precision_roles(devices), lambda event: None)


def calibrate_for(recipe: BaseRecipe, form: Form) -> Path:
    """Measure a recipe's passes on this machine, for a cluster of machines like it.

    Returns:
        The calibration file (see `calibrate`).
    """
    planner = planner_of(recipe)
    return calibrate(planner.pass_kinds(), resolve_path(recipe.storage.cache), planner.threads(form))
