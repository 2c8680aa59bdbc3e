"""A student's plan in words: its lines on the terminal, how many devices are worth it, and why it cannot run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from distcse.checks import gib
from distcse.planning.costs import FITS, RESTART, PlannedTeacher, StudentPlan
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
_WORTH = 1.1
"""Times of the shortest time that fewer devices may take."""
NOT_COUNTED = "not counted: start of Ray and imports, downloads, the final evaluation, other load on the machines"


def estimate_student(
    plan: StudentPlan, counts: Sequence[int] = (), price: float | None = None, problems: Sequence[str] = ()
) -> Estimate:
    """Return a student's plan, whose first lines are the shortest answer; `problems` are why the cluster has no room for it.

    `counts` and `price` are those of `worth_of`.
    """
    machine, training, step, needed = plan.cluster.machine, plan.recipe.training, plan.step, sum(plan.memory.values())
    problems, worth, held = (*problems, *memory_problems(plan)), worth_of(plan, counts, price), size_text(needed)
    held += f" of {size_text(machine.memory)} per worker"
    short = f"{span(plan.seconds)}, {held}, {size_text(plan.disk_bytes)} of cache; bound by {step.binding}"
    stored = {**plan.tables, **({"candidates": plan.candidate_bytes} if plan.pairs else {})}
    lines = [
        f"{plan.recipe.name} on {plan.cluster.spec} ({machine.name})",
        f"in short   {f'IMPOSSIBLE: {problems[0]}' if problems else short}",
        *_worth_lines(plan, worth),
        "",
        f"student    {_describe_shape(plan.student)}; {plan.trained / 1e6:.1f} M are trained",
        *(f"teacher {number}  {_describe_teacher(teacher)}" for number, teacher in enumerate(plan.teachers)),
        f"text       {plan.lengths.rows:,} sentences; {plan.lengths.mean(plan.recipe.student.longest):.1f} tokens on "
        f"average, padded to {plan.padded:.1f}",
        f"steps      {plan.steps:,} of {plan.batch} sentences on {plan.workers:,} worker{'s' if plan.workers > 1 else ''}, "
        f"{'two views' if plan.has_dropout else 'one pass for both views'}, {training.precision}, ZeRO {training.zero_stage}",
        "",
        f"{'phase':<20}{'time':>12}   bottleneck",
        *(
            f"{phase.name:<20}{span(phase.seconds):>12}   {phase.binding}{f' ({phase.note})' if phase.note else ''}"
            for phase in plan.phases
        ),
        f"{'all':<20}{span(plan.seconds):>12}",
        "",
        f"step       {span(plan.step_seconds)}: matrix products {span(step.math)}, memory traffic {span(step.traffic)}, host "
        f"{span(step.host)}{' (overlapped)' if machine.kind == 'gpu' else ''}, network {span(step.network)}, waiting for "
        f"lists {span(step.waiting)}",
        f"lost node  {span(plan.lost_node_seconds)} on average: half the steps between checkpoints, and {RESTART:g} s to restart "
        "(assumed)",
        f"tables     {_sizes(stored) or 'none'}; total cache {size_text(plan.disk_bytes)}",
        f"memory     {held}: {_sizes(plan.memory)}",
        "",
        f"assumes    {ESTIMATE if plan.measured is None else plan.measured.note}",
        f"assumes    {machine.name}: rates of {machine.source}; nodes are connected at 100 Gbit/s",
        f"assumes    {plan.lengths.source}",
        f"assumes    {NOT_COUNTED}",
        *(f"advice     {line}" for line in advice_of(plan)),
        *(f"IMPOSSIBLE {problem}" for problem in problems),
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
        "lost_node_seconds": plan.lost_node_seconds,
        "step": {"seconds": plan.step_seconds, "binding": step.binding, **vars(step)},
        "tables": plan.tables,
        "candidates": plan.candidate_bytes,
        "disk": plan.disk_bytes,
        "memory": {"stage": training.zero_stage, **plan.memory, "total": needed},
        "problems": problems,
        "scaling": worth,
    }
    return Estimate(lines, described, problems)


def worth_of(plan: StudentPlan, counts: Sequence[int], price: float | None = None) -> list[dict[str, Any]]:
    """Return the run's cost on each number of devices: all of them embed, and the fastest number of them trains.

    Without `counts`, they are the powers of two up to the cluster's devices; `price` is that of a device for an hour. The row
    that is `worth` it has the fewest devices within ten percent of the shortest time.
    """
    devices = 1 if plan.cluster.spec == "local" else plan.cluster.devices
    powers = [1 << power for power in range(devices.bit_length()) if 1 << power < devices]
    plans = {count: plan.on(count) for count in counts or [*powers, devices]}
    alone, fastest = plan.on(1).seconds, min(each.seconds for each in plans.values())
    worth = min(count for count, each in plans.items() if each.seconds <= _WORTH * fastest)
    return [
        {
            "devices": count,
            "workers": each.workers,
            "teachers": sum(phase.seconds for phase in each.phases if phase.name.startswith("teacher ")),
            "student": each.training_seconds,
            "seconds": each.seconds,
            "efficiency": alone / each.seconds / count,
            "cost": None if price is None else price * count * each.seconds / 3600,
            "memory": sum(each.memory.values()),
            "binding": each.step.binding,
            "worth": count == worth,
        }
        for count, each in plans.items()
    ]


def _worth_lines(plan: StudentPlan, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is worth it in a sentence, and the table of the numbers of devices."""
    if len(rows) < 2 and rows[0]["cost"] is None:
        return []
    lines = [
        "",
        f"{'devices':>9}{'workers':>9}{'teachers':>12}{'student':>12}{'all':>12}{'effic.':>8}{'cost':>10}{'memory':>11}"
        "  bottleneck",
    ]
    for row in rows:
        times = "".join(f"{span(row[key]):>12}" for key in ("teachers", "student", "seconds"))
        cost = "" if row["cost"] is None else f"{row['cost']:,.2f}"
        lines.append(
            f"{row['devices']:>9,}{row['workers']:>9,}{times}{row['efficiency']:>8.0%}{cost:>10}{size_text(row['memory']):>11}"
            f"  {row['binding']}"
        )
    best = next(row for row in rows if row["worth"])
    said = f"{best['devices']:,} x {plan.cluster.machine.name} with training.workers={best['workers']}: {span(best['seconds'])}"
    return [f"worth it   {said}, the fewest within 10 % of the fastest", *lines]


def advice_of(plan: StudentPlan) -> list[str]:
    """Return what would shorten a step that waits for the host or for lists."""
    servers = max(2, plan.recipe.teachers.num_servers * 2)
    found = {
        "host and launches": "the host is the bottleneck: a larger batch hardly takes more time per step",
        "teachers' lists": f"teachers' lists are the bottleneck: try teachers.num_servers={servers} or more",
    }
    return [line for binding, line in found.items() if binding == plan.step.binding]


def memory_problems(plan: StudentPlan) -> list[str]:
    """Return why a student's worker has too little memory, with a batch size that fits."""
    machine, cluster = plan.cluster.machine, plan.cluster
    # Workers on CPUs share their node's memory; every GPU has its own.
    sharing = min(plan.workers, cluster.per_node) if machine.kind == "cpu" else 1
    available, needed = FITS * machine.memory / sharing, sum(plan.memory.values())
    if needed <= available:
        return []
    smaller = (plan.batch >> halved for halved in range(1, plan.batch.bit_length() - 1))
    fits = (
        batch
        for batch in smaller
        if batch % plan.workers == 0 and sum(plan.with_batch(batch).memory.values()) <= available
    )
    batch = next(fits, None)
    fix = f"write training.batch_size={batch}" if batch else "take a smaller backbone, or a larger device"
    return [
        f"a worker needs {gib(needed)} at ZeRO stage {plan.recipe.training.zero_stage}, {machine.name} has "
        f"{gib(available)}; {fix}, or more workers"
    ]


def _describe_shape(shape: Shape) -> str:
    sizes = f"{shape.layers} layers of width {shape.width}, {shape.parameters / 1e6:.1f} M parameters"
    return f"{shape.name}, {sizes}{'' if shape.is_read else ' (published; no config.json here)'}"


def _describe_teacher(teacher: PlannedTeacher) -> str:
    if teacher.shape is None:
        return f"{teacher.kind.section.backbone}, {teacher.kind.name} of unknown size"
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
