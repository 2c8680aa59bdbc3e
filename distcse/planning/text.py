"""A student's plan in words: its lines on the terminal, why it cannot run, and settings that would cost less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from distcse.checks import gib
from distcse.planning.costs import FITS, PlannedTeacher, StudentPlan, largest_divisor
from distcse.planning.sizes import Shape
from distcse.preflight.warnings import SettingsWarning


class Estimate(NamedTuple):
    """The cost of a recipe on a cluster."""

    lines: Sequence[str]
    """Lines for the terminal."""
    described: dict[str, Any]
    """The same for programs."""
    problems: Sequence[str]
    """Why the run would fail; empty if it fits."""
    warnings: Sequence[SettingsWarning] = ()


ESTIMATE = (
    "estimates of a few formulas, within a factor of two of recorded runs; for better ones on this machine: --measure"
)
NOT_COUNTED = "not counted: start of Ray and imports, downloads, the final evaluation, other load on the machines"


def estimate_student(plan: StudentPlan, counts: Sequence[int] = ()) -> Estimate:
    """Return a student's plan, also on numbers of devices; its first lines are the shortest answer."""
    machine, training, step, needed = plan.cluster.machine, plan.recipe.training, plan.step, sum(plan.memory.values())
    problems, advice, (scaled, scaled_lines) = student_problems(plan), student_advice(plan), scaling(plan, counts)
    held = f"{size_text(needed)} of {size_text(machine.memory)} per worker"
    short = f"{span(plan.seconds)}, {held}, {size_text(plan.disk_bytes)} of cache; bound by {step.binding}"
    stored = {**plan.tables, **({"candidates": plan.candidate_bytes} if plan.pairs else {})}
    lines = [
        f"{plan.recipe.name} on {plan.cluster.spec} ({machine.name})",
        f"in short   {f'IMPOSSIBLE: {problems[0]}' if problems else short}",
        "",
        f"student    {_describe_shape(plan.student)}; {plan.trained / 1e6:.1f} M are trained",
        *(f"teacher {number}  {_describe_teacher(teacher)}" for number, teacher in enumerate(plan.teachers)),
        f"text       {plan.lengths.rows:,} sentences; {plan.lengths.mean(plan.recipe.student.longest):.1f} tokens on "
        f"average, padded to {plan.padded(plan.batch / plan.workers):.1f}",
        f"steps      {plan.steps:,} of {plan.batch} sentences on {plan.workers:,} worker{'s' if plan.workers > 1 else ''}, "
        f"{'two views' if plan.has_dropout else 'one pass for both views'}, {training.precision}, ZeRO {training.zero_stage}",
        "",
        f"{'phase':<20}{'time':>12}   binds",
        *(
            f"{phase.name:<20}{span(phase.seconds):>12}   {phase.binding}{f' ({phase.note})' if phase.note else ''}"
            for phase in plan.phases
        ),
        f"{'all':<20}{span(plan.seconds):>12}",
        "",
        f"step       {span(plan.step_seconds)}: matrix products {span(step.math)}, memory traffic {span(step.traffic)}, host "
        f"{span(step.host)}{' (overlapped)' if machine.kind == 'gpu' else ''}, network {span(step.network)}, waiting for "
        f"lists {span(step.waiting)}",
        f"tables     {_sizes(stored) or 'none'}; total cache {size_text(plan.disk_bytes)}",
        f"memory     {held}: {_sizes(plan.memory)}",
        "",
        f"assumes    {ESTIMATE if plan.measured is None else plan.measured.note}",
        f"assumes    {machine.name}: rates of {machine.source}; nodes are connected at 100 Gbit/s",
        f"assumes    {plan.lengths.source}",
        f"assumes    {NOT_COUNTED}",
        *(f"advice     {line}" for line in advice),
        *(f"IMPOSSIBLE {problem}" for problem in problems),
        *scaled_lines,
    ]
    described = {
        "recipe": plan.recipe.name,
        "cluster": plan.cluster.spec,
        "measured": plan.measured is not None,
        "workers": plan.workers,
        "batch": plan.batch,
        "rows": plan.lengths.rows,
        "steps": plan.steps,
        "phases": [phase._asdict() for phase in plan.phases],
        "seconds": plan.seconds,
        "training_seconds": plan.training_seconds,
        "step": {"seconds": plan.step_seconds, "binding": step.binding, **vars(step)},
        "tables": plan.tables,
        "candidates": plan.candidate_bytes,
        "disk": plan.disk_bytes,
        "memory": {"stage": training.zero_stage, **plan.memory, "total": needed},
        "problems": problems,
        "advice": advice,
        "scaling": scaled,
    }
    return Estimate(lines, described, problems)


def scaling(plan: StudentPlan, counts: Sequence[int]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the cost on numbers of devices, with the recipe's batch over them and with that batch on each, and as lines."""
    kind, found = plan.cluster.machine.kind, []
    lines = [
        "",
        f"on more of {plan.cluster.machine.name} (left: the recipe's batch over the workers, "
        "right: the recipe's batch on each of them)",
        f"{'devices':>8}{'teachers':>12}{'train':>7}{'step':>10}{'effic.':>8}{'student':>12} |"
        f"{'batch':>9}{'step':>10}{'effic.':>8}{'memory':>11}  binds",
    ]
    alone = plan.step_on(1, plan.batch, plan.cluster).seconds(kind)
    for count in counts:
        cluster = replace(plan.cluster, nodes=math.ceil(count / plan.cluster.per_node))
        workers, batch = largest_divisor(plan.batch, count), plan.batch * count
        grown = plan.step_on(count, batch, cluster)
        strong, weak = plan.step_on(workers, plan.batch, cluster).seconds(kind), grown.seconds(kind)
        row = {
            "devices": count,
            "teachers": sum(plan.embedding(number, count).seconds for number in range(len(plan.teachers))),
            "student": plan.steps * strong,
            "memory": sum(plan.memory_of(count, batch).values()),
        }
        shares = {"strong": alone / strong / workers, "weak": alone / weak}
        found.append({**row, "efficiency": shares})
        lines.append(
            f"{count:>8,}{span(row['teachers']):>12}{workers:>7,}{span(strong):>10}{shares['strong']:>8.0%}"
            f"{span(row['student']):>12} |{batch:>9,}{span(weak):>10}{shares['weak']:>8.0%}"
            f"{size_text(row['memory']):>11}  {grown.binding}"
        )
    return found, lines if counts else []


def student_problems(plan: StudentPlan) -> list[str]:
    """Return why a student's plan cannot run, each with settings that fix it."""
    found, machine, cluster = [], plan.cluster.machine, plan.cluster
    if cluster.spec != "local" and plan.workers > cluster.devices:
        found.append(
            f"training.workers is {plan.workers}, but {cluster.spec} has {cluster.devices} devices; write "
            f"training.workers={cluster.devices} or fewer"
        )
    # Workers on CPUs share their node's memory; every GPU has its own.
    sharing = min(plan.workers, cluster.per_node) if machine.kind == "cpu" else 1
    available, needed = FITS * machine.memory / sharing, sum(plan.memory.values())
    if needed > available:
        smaller = (plan.batch >> halved for halved in range(1, plan.batch.bit_length() - 1))
        batch = next(
            (
                batch
                for batch in smaller
                if batch % plan.workers == 0 and sum(plan.memory_of(plan.workers, batch).values()) <= available
            ),
            None,
        )
        fix = f"write training.batch_size={batch}" if batch else "take a smaller backbone, or a larger device"
        found.append(
            f"a worker needs {gib(needed)} at ZeRO stage {plan.recipe.training.zero_stage}, {machine.name} has "
            f"{gib(available)}; {fix}, or more workers"
        )
    return found


def student_advice(plan: StudentPlan) -> list[str]:
    """Return settings that would cost less."""
    found, machine = [], plan.cluster.machine
    if idle := max(0, plan.cluster.devices - plan.workers - plan.others):
        found.append(
            f"{idle:,} of {plan.cluster.devices:,} devices do not train (batch {plan.batch}): "
            "use them with a larger batch, or with parallel trials or seeds"
        )
    counts = [count for count in range(1, plan.workers + 1) if plan.batch % count == 0]
    steps = {count: plan.step_on(count, plan.batch, plan.cluster).seconds(machine.kind) for count in counts}
    own = plan.step.seconds(machine.kind)
    best = min(steps, key=lambda count: steps[count])
    if steps[best] <= 0.9 * own:
        found.append(
            f"training.workers={best} takes {1e3 * steps[best]:.3g} ms per step, {plan.workers} take {1e3 * own:.3g}: "
            "use fewer workers, and the other devices for trials or seeds"
        )
    if plan.step.binding == "host and launches":
        found.append("the host is the bottleneck: a larger batch hardly takes more time per step")
    if plan.step.binding == "teachers' lists":
        servers = max(2, plan.recipe.teachers.num_servers * 2)
        found.append(f"teachers' lists are the bottleneck: try teachers.num_servers={servers} or more")
    return found


def _describe_shape(shape: Shape) -> str:
    sizes = f"{shape.layers} layers of width {shape.width}, {shape.parameters / 1e6:.1f} M parameters"
    return f"{shape.name}, {sizes}{'' if shape.is_read else ' (published; no config.json here)'}"


def _describe_teacher(teacher: PlannedTeacher) -> str:
    if teacher.shape is None:
        return f"{teacher.kind.section.backbone}, no model that is computed here"
    source = "rank space" if teacher.list_source == "rank" else teacher.list_source
    work = source if teacher.kind.has_vectors else teacher.kind.name
    return f"{_describe_shape(teacher.shape)}, {teacher.kind.precision}, {work}"


def _sizes(sizes: dict[str, float]) -> str:
    return ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items())


def span(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for unit, name in ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    # Rounded, so that no sum's error remains of a difference that is 0.
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * round(seconds, 9):.3g} ms"


def size_text(size: float) -> str:
    """Format bytes in a readable unit."""
    units = ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"))
    return next((f"{size / 10**power:,.3g} {name}" for power, name in units if size >= 10**power), f"{size:.0f} B")
