"""What a mutual distillation costs: training and scoring of every group in every phase, and the time that groups wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcse.checks import gib
from distcse.errors import CorpusTooSmallError, DistcseError
from distcse.events import Reporter
from distcse.planning.costs import FITS, PROCESS, Pass, step_terms, worker_memory
from distcse.planning.machines import PlannedCluster
from distcse.planning.sizes import Lengths, assumed_lengths, read_lengths, read_shape
from distcse.planning.text import ESTIMATE, NOT_COUNTED, Estimate, size_text, span
from distcse.recipe import KINDS, GroupSection, MutualRecipe
from distcse.runs.mutual.pairs import fit_to_pairs, temporary_pairs
from distcse.runs.mutual.phase_store import Kind
from distcse.runs.mutual.processes import with_max_workers
from distcse.training.schedule import total_steps

_FILLED = 1.1
"""Tokens with padding over real ones: a batch is split into parts of similar length."""
_ASSUMED_PAIRS = 10_000


def _read_pairs(recipe: MutualRecipe, rows: int | None) -> tuple[int, Lengths]:
    """Return the number of pairs and their texts' lengths: `rows`, those that the recipe mines or has in files, or 10,000."""
    if recipe.pairs.mine is not None:
        return rows or recipe.pairs.mine.pairs, read_lengths(recipe.pairs.mine.corpus, recipe.groups[0], None)
    counted = rows
    try:
        with temporary_pairs(recipe) as pairs:
            counted = rows or len(pairs)
    except CorpusTooSmallError:
        raise
    except DistcseError:  # the files are elsewhere
        pass
    number = counted or recipe.pairs.limit or _ASSUMED_PAIRS
    assumed = "" if counted else f"; {number:,} pairs assumed: give --corpus-rows"
    return number, assumed_lengths(2 * number, f"pairs in files are not tokenized for a plan{assumed}")


def _plan_part(
    recipe: MutualRecipe, group: GroupSection, kind: Kind, pairs: int, lengths: Lengths, cluster: PlannedCluster
) -> dict[str, Any]:
    """Return the cost of a group in a phase, which trains one of its formulations and scores all pairs with it.

    Seconds of `training` and `scoring`; bytes of `memory` of a worker that trains, with the scorer process next to it.
    """
    section, machine = recipe.loop_of(group, kind), cluster.machine
    encoder, texts, rows, longest = group, 2.0, pairs, group.longest
    if kind == "cross":  # it starts from another model, and reads a pair as one text, at its first token
        settings = recipe.cross_of(group)
        encoder = group.model_copy(update={"backbone": recipe.cross_start(group), "pooling": "cls"})
        texts, lengths, longest = 1.0, lengths.pairs(), settings.max_length
        rows *= 2 if settings.both_orders else 1
    shape, length = read_shape(encoder), lengths.mean(longest or 512)
    work = Pass(shape, texts * section.batch_size / group.workers, _FILLED * length, True, section.precision)
    step = step_terms([work], shape.parameters, cluster, group.workers, section)
    steps = total_steps(section, max(1, rows // section.batch_size))
    scored = Pass(shape, texts * pairs, length, precision=recipe.mutual.precision).batched_seconds(machine)
    scorer = 4.0 * shape.parameters + (PROCESS if machine.kind == "cpu" else 0.0)
    memory = worker_memory(shape.parameters, section.zero_stage, group.workers, scorer, work.saved_bytes(machine.kind))
    return {
        "group": group.name,
        "path": recipe.loop_path(group, kind),
        "kind": kind,
        "workers": group.workers,
        "steps": steps,
        "training": steps * step.seconds(machine.kind),
        "scoring": scored / group.workers,
        "memory": sum(memory.values()),
        "binding": step.binding,
    }


def plan_groups(
    recipe: MutualRecipe, cluster: PlannedCluster, rows: int | None, missing: Sequence[str] = ()
) -> Estimate:
    """Estimate the cost of all groups over all cycles on a cluster, which lacks what is `missing` for their processes.

    `rows` are the pairs, None for those of the recipe.
    """
    pairs, lengths = _read_pairs(recipe, rows)
    recipe = fit_to_pairs(with_max_workers(recipe, Reporter()), pairs)
    parts = {
        kind: [_plan_part(recipe, group, kind, pairs, lengths, cluster) for group in recipe.groups] for kind in KINDS
    }
    shared = recipe.mutual.shared_workers if recipe.ray else None
    shared = cluster.devices if shared == "auto" else shared
    devices, how = 1, "one after the other"
    if recipe.ray:
        devices = shared or min(sum(group.workers for group in recipe.groups), cluster.devices)
        how = f"in parallel on {devices} devices" if shared is None else f"on {devices} shared workers"

    def cost(kind: Kind, trains: bool = True) -> tuple[float, float]:
        """Return the seconds of a phase, and those that its devices work: it ends with its slowest group."""
        each = [part["scoring"] + (part["training"] if trains else 0.0) for part in parts[kind]]
        if not recipe.ray:
            return sum(each), sum(each)
        work = sum(seconds * part["workers"] for seconds, part in zip(each, parts[kind], strict=True)) / devices
        return max(work, *each), work

    # The start scores with the bi-encoders; each cycle then trains and scores both.
    phases = [cost("bi", trains=False), *recipe.mutual.cycles * [cost("cross"), cost("bi")]]
    seconds = sum(spent for spent, _ in phases)
    idle = max(0.0, 1 - sum(work for _, work in phases) / seconds)
    all_parts = [*parts["cross"], *parts["bi"]]
    problems = [
        *missing,
        *(
            f"group {part['group']} needs {gib(part['memory'])} for its {part['kind']}-encoder, more than "
            f"{cluster.machine.name} has; lower {part['path']}.batch_size, or raise workers of the group"
            for part in all_parts
            if part["memory"] > FITS * cluster.machine.memory
        ),
    ]
    lines = [
        f"{recipe.name} on {cluster.spec} ({cluster.machine.name})",
        f"in short   {f'IMPOSSIBLE: {problems[0]}' if problems else span(seconds)}",
        "",
        f"{pairs:,} pairs, {recipe.mutual.cycles} cycles, {len(recipe.groups)} groups {how}; in a cycle:",
        f"{'group':<12}{'phase':<8}{'steps':>8}{'training':>12}{'scoring':>12}{'memory':>11}   bottleneck",
        *(
            f"{part['group']:<12}{part['kind']:<8}{part['steps']:>8,}{span(part['training']):>12}"
            f"{span(part['scoring']):>12}{size_text(part['memory']):>11}   {part['binding']}"
            for part in all_parts
        ),
        "",
        *([f"idle       {idle:.0%} of the devices' time: a phase ends with its slowest group"] if recipe.ray else []),
        f"assumes    {ESTIMATE}",
        f"assumes    {cluster.machine.name}: rates of {cluster.machine.source}",
        f"assumes    {lengths.source}",
        f"assumes    {NOT_COUNTED}; mining and dev scores",
        *(f"IMPOSSIBLE {problem}" for problem in problems),
    ]
    described = {
        "recipe": recipe.name,
        "cluster": cluster.spec,
        "pairs": pairs,
        "shared_workers": shared,
        "seconds": seconds,
        "idle": idle,
        "phases": all_parts,
        "problems": problems,
    }
    return Estimate(lines, described, problems)
