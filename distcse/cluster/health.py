"""`distcse doctor`: checks of this machine, of Ray and the cluster at RAY_ADDRESS, and of all that a recipe wants."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from distcse.checks import Check, answers, fail, ok, warn
from distcse.cluster.cluster import fix_of_joining
from distcse.cluster.nodes import alive, this_machine
from distcse.cluster.versions import (
    FIRST_UNSUPPORTED,
    OLDEST,
    current_cluster_file,
    find_long_socket_path,
    use_given_token,
)
from distcse.devices.device import local_speed
from distcse.devices.resources import Node, format_nodes
from distcse.errors import ClusterTooSmallError, DistcseError, EncoderError, StorageWriteError
from distcse.preflight import machine
from distcse.preflight.models import model_questions
from distcse.recipe import BaseRecipe, Recipe, StorageSection
from distcse.runs.distillation.precompute import require_space
from distcse.runs.experiment import Experiment, experiment_of
from distcse.storage import open_store, resolve_path
from distcse.teachers.kinds import kind_of
from distcse.text import source_rows

_DASHBOARD = 8265
_CLIENT = 10001
_LOOPBACK = "127.0.0.1"
_COUNTED_ROWS = 2_000_000
"""Rows of the text that are counted: some seconds."""


def diagnose(recipe: BaseRecipe | None = None) -> Iterator[Check]:
    """Yield the checks of this machine, of the cluster, and of a recipe if there is one, each as soon as it is known."""
    storage = StorageSection() if recipe is None else recipe.storage
    cache = storage.cache if recipe is not None else os.environ.get("DISTCSE_CACHE") or storage.cache
    folders = {
        f"storage.{key}": resolve_path(folder).expanduser().absolute()
        for key, folder in (("runs", storage.runs), ("cache", cache))
    }
    yield machine.check_python()
    yield machine.check_package("torch>=2.8", (2, 8))
    yield machine.check_package("transformers>=5,<6", (5, 0), (6, 0))
    supported = f">={'.'.join(map(str, OLDEST))},<{'.'.join(map(str, FIRST_UNSUPPORTED))}"
    yield machine.check_package(f"ray[default,train,tune]{supported}", OLDEST, FIRST_UNSUPPORTED)
    yield machine.check_cpus()
    yield machine.check_gpus(recipe)
    yield machine.check_precision(None if recipe is None else experiment_of(recipe).precision_roles([local_speed()]))
    yield machine.check_memory()
    yield machine.check_shared_memory()
    yield machine.check_open_files()
    yield machine.check_deepspeed(recipe)
    yield from check_cluster(folders, recipe)
    yield from check_token()
    yield check_ports()
    for key, folder in folders.items():
        yield from machine.check_location(key, folder)
    if recipe is not None:
        yield from check_recipe(recipe)


def check_recipe(recipe: BaseRecipe) -> Iterator[Check]:
    """Ask what a run of the recipe asks before it starts, and yield the warnings that it would report."""
    experiment = experiment_of(recipe)
    yield from answers(model_questions(recipe))
    for teacher in recipe.inputs.teachers:
        yield from kind_of(teacher, only_local=True).check_source()
    yield from answers(experiment.questions())
    if isinstance(recipe, Recipe):
        yield from check_tables(recipe)
    try:
        warnings = experiment.settings_warnings(only_local=True)
    except DistcseError as error:
        yield fail("settings", error.coded_message, "or correct the recipe")
        return
    for warning in warnings:
        yield warn("settings", f"[{warning.code}] {warning.problem}", warning.fix)
    if not warnings:
        yield ok("settings", "nothing to warn of")


def check_tables(recipe: Recipe) -> list[Check]:
    """Check that the teachers' tables have room in the cache, by the text's rows; those that are stored already count too."""
    if any(source.dataset is not None for source in recipe.corpus.all_sources):
        return []
    try:
        most = min(_COUNTED_ROWS, recipe.corpus.limit_of_all or _COUNTED_ROWS)
        rows = sum(1 for _ in islice(source_rows(recipe.corpus), most))
        kinds = [kind_of(section, only_local=True) for section in recipe.teachers.encoders]
        tables = [number for number, kind in enumerate(kinds) if kind.uses_table(recipe.teachers.mode)]
        needed = require_space(recipe, dict.fromkeys(tables, rows))
    except StorageWriteError as error:
        problem, _, fix = error.coded_message.partition("; ")
        return [warn("tables", problem, f"{fix}, unless they are stored already")]
    except DistcseError:  # the checks of the text and the models report it
        return []
    return [ok("tables", f"{needed} for {rows:,} rows{' and more' if rows == _COUNTED_ROWS else ''}")]


def check_cluster(shared: Mapping[str, Path] | None = None, recipe: BaseRecipe | None = None) -> list[Check]:
    """Check the cluster at RAY_ADDRESS: whether its nodes have this one's versions, time and files, and room for a recipe."""
    address = os.environ.get("RAY_ADDRESS")
    experiment = None if recipe is None or not recipe.uses_ray else experiment_of(recipe)
    if not address:
        running = _find_running()
        found = (
            "none; each run starts one on this machine"
            if running is None
            else f"one is running at {running}, not used; export RAY_ADDRESS={running} to use it"
        )
        sockets = find_long_socket_path()
        too_long = [] if sockets is None else [fail("ray folder", *sockets)]
        return [ok("cluster", found), *too_long, *_resources(experiment, [this_machine()])]
    use_given_token()
    import ray

    was_up = ray.is_initialized()
    try:
        if not was_up:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return [*_nodes(address, shared or {}, experiment), *_resources(experiment, alive())]
    except Exception as error:  # Ray raises errors of many types if a cluster cannot be joined
        summary = f"cannot join {address}: {' '.join(str(error).split())[:200]}"
        return [fail("cluster", summary, fix_of_joining(error))]
    finally:
        if not was_up:
            ray.shutdown()


def _resources(experiment: Experiment[Any] | None, nodes: Sequence[Node]) -> list[Check]:
    """Check that the nodes can run a recipe's processes at the same time."""
    if experiment is None:
        return []
    wait_s = experiment.recipe.resources.wait_s
    try:
        experiment.check_resources(nodes)
    except ClusterTooSmallError as error:
        found, _, fix = error.coded_message.partition("; ")
        if wait_s and os.environ.get("RAY_ADDRESS"):
            return [warn("resources", found, f"a run waits {wait_s:g} s for nodes; otherwise {fix}")]
        return [fail("resources", found, fix)]
    except EncoderError:  # the check of the models reports it
        return []
    return [ok("resources", f"enough for the recipe: {format_nodes([node.resources for node in nodes])}")]


def _nodes(address: str, shared: Mapping[str, Path], experiment: Experiment[Any] | None) -> list[Check]:
    """Ask the nodes what a run asks them, those with the recipe's labels."""
    import ray

    from distcse.cluster.node_checks import find_unlike, versions

    needs = None if experiment is None else experiment.needs
    read, labels = ({}, [None]) if needs is None else (needs.read, [*needs.labels.values()])
    written = {key: folder for key, folder in shared.items() if open_store(folder).is_remote or folder.is_dir()}
    found = []
    for node, problem in find_unlike(written, read, labels).items():
        description, _, fix = problem.partition("; ")
        found.append(fail("cluster", f"node {node} {description}", fix))
    nodes, resources, own = alive(), ray.cluster_resources(), versions()
    summary = f"{address}: {len(nodes)} nodes, {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    return found or [ok("cluster", f"{summary}; all with ray {own['ray']} and python {own['python']}")]


def check_token(environment: Mapping[str, str] | None = None, home: Path | None = None) -> list[Check]:
    """Check that Ray requires a token, and that other users cannot read it."""
    variables = os.environ if environment is None else environment
    mode, address = variables.get("RAY_AUTH_MODE", ""), variables.get("RAY_ADDRESS", "")
    file = (Path.home() if home is None else home) / ".ray" / "auth_token"
    has_token = variables.get("RAY_AUTH_TOKEN") or variables.get("RAY_AUTH_TOKEN_PATH") or file.exists()
    if mode == "disabled":
        fix = "export RAY_AUTH_MODE=token in every shell: anyone who reaches the ports can run code"
        found = [warn("ray token", "RAY_AUTH_MODE is disabled", fix)]
    elif mode == "token" and address and not has_token:
        fix = "export RAY_AUTH_TOKEN, or copy ~/.ray/auth_token"
        found = [fail("ray token", "RAY_AUTH_MODE is token, but there is no token", fix)]
    elif not mode and address:
        fix = "export RAY_AUTH_MODE=token if the cluster requires a token"
        found = [warn("ray token", "RAY_AUTH_MODE is not set", fix)]
    else:
        found = [ok("ray token", "required" if mode else "required by the clusters that runs start")]
    if file.exists() and stat.S_IMODE(file.stat().st_mode) & 0o077:
        found.append(warn("ray token file", f"{file} can be read by others", f"chmod 600 {file}"))
    return found


def check_ports(ports: Sequence[int] = (_DASHBOARD, _CLIENT)) -> Check:
    """Check that Ray's job and client ports are not reachable from other machines: without a token anyone could run code."""
    api_port = os.environ.get("RAY_API_SERVER_ADDRESS", "").rpartition(":")[2]
    ports_to_check = {*ports, *([int(api_port)] if api_port.isdigit() else [])}
    own = _own_address()
    found = {port: own != _LOOPBACK and _accepts(own, port) for port in sorted(ports_to_check)}
    reachable = [str(port) for port, is_reachable in found.items() if is_reachable]
    if not reachable:
        local = [str(port) for port in found if _accepts(_LOOPBACK, port)]
        return ok(
            "ray ports", f"{', '.join(local)} on loopback only" if local else "no dashboard or client port is open"
        )
    summary = f"port {', '.join(reachable)} is reachable from other machines"
    fix = "start the head with --dashboard-host=127.0.0.1 and without a client port, and use an ssh tunnel"
    if os.environ.get("RAY_AUTH_MODE") == "token":
        return warn("ray ports", f"{summary}, protected by a token", fix)
    return fail("ray ports", summary, fix)


def _own_address() -> str:
    """Return this machine's address in its network, that of the loopback without one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return _LOOPBACK


def _accepts(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
        return True
    except OSError:
        return False


def _find_running() -> str | None:
    """Return the address of a cluster that was started on this machine and still answers."""
    try:
        address = current_cluster_file().read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=1):
            return address
    except (OSError, ValueError):  # there is no file, or its cluster has ended
        return None
