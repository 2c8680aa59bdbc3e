"""Formats a plan as text: cost, bottleneck, assumptions, advice and problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distcse.planning.groups import MutualPlan
from distcse.planning.machines import COMPILED_TRAFFIC, Cluster
from distcse.planning.memory import WorkerMemory
from distcse.planning.plan import StudentPlan
from distcse.planning.scaling import ScalingRow
from distcse.planning.shapes import Shape

_NOT_COUNTED = "not counted: start of Ray and imports, downloads, the final evaluation, other load on the machines"


def student_lines(plan: StudentPlan) -> list[str]:
    """Format the plan of a student's run as lines of text."""
    run, machine = plan.run, plan.cluster.machine
    training = run.recipe.training
    real, processed = plan.tokens
    step, kind = plan.step, machine.kind
    lines = [
        f"{run.recipe.name} on {plan.cluster.spec}: {_machines(plan.cluster)}",
        f"in short   {_in_short(plan)}",
        "",
        f"student    {run.student.name}, {run.student.layers} layers of width {run.student.width}, "
        f"{run.student.parameters / 1e6:.1f} M parameters; {run.trained / 1e6:.1f} M are trained",
        *(f"teacher {n}  {_teacher(plan, n)}" for n in range(len(run.teachers))),
        f"text       {run.rows:,} sentences; {run.lengths.mean(run.recipe.student.max_length):.1f} tokens on average, padded to "
        f"{run.padded(plan.batch / plan.workers):.1f}",
        f"steps      {run.steps:,} of {plan.batch} sentences on {plan.workers:,} worker{'s' if plan.workers > 1 else ''}, "
        f"{'two views' if run.has_dropout else 'one pass for both views'}, {training.precision}, ZeRO {training.zero_stage}",
        f"tokens     {_count(real)} read by the student, {_count(processed)} with padding, per view",
        "",
        f"{'phase':<20}{'time':>12}{'PFLOP':>12}   binds",
    ]
    for phase in plan.phases:
        flops = f"{phase.flops / 1e15:,.4g}" if phase.flops else "-"
        note = f" ({phase.note})" if phase.note else ""
        lines.append(f"{phase.name:<20}{span(phase.seconds):>12}{flops:>12}   {phase.binding}{note}")
    total = sum(phase.flops for phase in plan.phases)
    lines += [
        f"{'all':<20}{span(plan.seconds):>12}{total / 1e15:>12,.4g}",
        "",
        f"step       {_ms(plan.step_seconds)}: matrix products {_ms(step.math)}, memory traffic {_ms(step.traffic)}, host "
        f"{_ms(step.host)}{' (overlapped)' if kind == 'gpu' else ''}, network {_ms(step.network)}, "
        f"waiting for lists {_ms(step.waiting)}",
        f"binds      {step.binding}",
        f"network    {_bytes(plan.traffic.total)} per step and worker: gradients {_bytes(plan.traffic.gradients)}, views "
        f"{_bytes(plan.traffic.views)}, lists {_bytes(plan.traffic.lists)}"
        + (f", teachers' vectors {_bytes(plan.traffic.vectors)}" if plan.traffic.vectors else ""),
        f"tables     {', '.join(f'{name} {_bytes(size)}' for name, size in plan.tables.items()) or 'none'}; total cache "
        f"{_bytes(plan.disk_bytes)}",
        "",
        *_memory_lines(plan.memories, run.recipe.training.zero_stage, machine.memory),
        f"host       {_bytes(plan.host_bytes)} per worker for row order and checkpoints, of {_bytes(machine.host_memory)}",
    ]
    return [
        *lines,
        "",
        *_assumptions(plan.cluster, [run.lengths.source, *_measured(plan)], _shapes(plan)),
        *(f"advice     {line}" for line in plan.advice),
        *(f"IMPOSSIBLE {problem}" for problem in plan.problems),
    ]


def family_lines(
    plans: Mapping[str, StudentPlan], static: Sequence[str], side_by_side: int, seconds: float
) -> list[str]:
    """Format the plans of a family's students as lines of text: the first one's, then what each of the others adds.

    Args:
        plans: The students' plans by name, in the order in which they are trained.
        static: Names of the static students, which are trained after them.
        side_by_side: Number of students that train at the same time, one on each GPU.
        seconds: Duration of all that is counted.
    """
    how = "one after the other" if side_by_side == 1 else f"side by side on {side_by_side} GPUs"
    lines = [
        f"family     {len(plans)} students {how}, {span(seconds)} in all; the text is read and embedded once",
        f"{'student':<20}{'training':>12}{'step':>12}   parameters",
    ]
    for name, plan in plans.items():
        parameters = f"{plan.run.student.parameters / 1e6:.1f} M"
        lines.append(f"{name:<20}{span(plan.training_seconds):>12}{_ms(plan.step_seconds):>12}   {parameters}")
    for name in static:
        lines.append(f"{name:<20}{'not counted':>12}{'':>12}   one vector per token; trained last, on the same targets")
    return [*lines, "", *student_lines(next(iter(plans.values())))]


def _in_short(plan: StudentPlan) -> str:
    """Format the answer that most readers want: whether it can be done, how long it takes, and how much it holds."""
    if plan.problems:
        return f"IMPOSSIBLE: {plan.problems[0]}"
    stage = plan.run.recipe.training.zero_stage
    held = next(memory.total for memory in plan.memories if memory.stage == stage)
    memory = f"{_bytes(held)} of {_bytes(plan.cluster.machine.memory)} per worker"
    return f"{span(plan.seconds)}, {memory}, {_bytes(plan.disk_bytes)} of cache; bound by {plan.step.binding}"


def mutual_lines(plan: MutualPlan) -> list[str]:
    """Format the plan of a mutual distillation as lines of text."""
    how = "in parallel" if plan.side_by_side else "one after the other"
    if plan.shares_devices:
        how = f"in parallel, which share {plan.cluster.devices} device{'s' * (plan.cluster.devices != 1)}"
    if plan.shared_workers is not None:
        how = f"on {plan.shared_workers} shared workers"
        how += f", in {waves} waves" if (waves := -(-len(plan.shapes) // plan.shared_workers)) > 1 else ""
    lines = [
        f"{plan.recipe.name} on {plan.cluster.spec}: {_machines(plan.cluster)}",
        f"in short   {f'IMPOSSIBLE: {plan.problems[0]}' if plan.problems else span(plan.seconds)}",
        "",
        f"{plan.pairs:,} pairs, {plan.recipe.mutual.cycles} cycles, {len(plan.shapes)} groups {how}",
        "",
        f"{'phase':<16}{'group':<12}{'steps':>8}{'training':>12}{'scoring':>12}{'PFLOP':>10}   binds",
    ]
    for stages in plan.stages:
        for stage in stages:
            lines.append(
                f"{stage.phase:<16}{stage.group:<12}{stage.steps:>8,}{span(stage.training):>12}{span(stage.scoring):>12}"
                f"{stage.flops / 1e15:>10,.3g}   {stage.binding}"
            )
    lines += [f"{'all':<16}{'':<12}{'':>8}{span(plan.seconds):>12}", ""]
    if plan.side_by_side or plan.shares_devices:
        lines.append(f"idle       {plan.idle:.0%} of the groups' time: a phase ends with its slowest group")
    if plan.shared_workers is not None:
        lines.append(f"idle       {plan.idle:.0%} of the shared workers' time, without their starts")
    for name, kinds in plan.memories.items():
        sizes = ", ".join(f"{kind} {_bytes(memory.total)}" for kind, memory in sorted(kinds.items()))
        lines.append(f"memory     {name}: {sizes} per worker, including its scorer")
    lines.append(
        f"host       {_bytes(plan.driver_bytes)} in the driver for the pairs, of {_bytes(plan.cluster.machine.host_memory)}"
    )
    notes = [plan.lengths.source, "mining and dev scores are not counted"]
    lines += ["", *_assumptions(plan.cluster, notes, [shape for shapes in plan.shapes for shape in shapes.values()])]
    return [*lines, *(f"IMPOSSIBLE {problem}" for problem in plan.problems)]


def scaling_lines(rows: Sequence[ScalingRow], machine: str) -> list[str]:
    """Format the cost of the same run on different numbers of devices as lines of text."""
    head = (
        f"{'devices':>8}{'teachers':>12}{'train':>7}{'step':>10}{'effic.':>8}{'student':>12} |"
        f"{'batch':>9}{'step':>10}{'compute':>10}{'straggle':>10}{'network':>10}{'lists':>10}{'effic.':>8}{'memory':>11}  binds"
    )
    lines = [
        "",
        f"on more of {machine} (left: the recipe's batch over the workers, right: the recipe's batch on each of them)",
        head,
    ]
    for row in rows:
        strong, weak = row.strong, row.weak
        lines.append(
            f"{row.devices:>8,}{span(row.teachers):>12}{strong.workers:>7,}{_ms(strong.seconds):>10}{strong.efficiency:>8.0%}"
            f"{span(row.student):>12} |{weak.batch:>9,}{_ms(weak.seconds):>10}{_ms(weak.compute):>10}{_ms(weak.straggling):>10}"
            f"{_ms(weak.network):>10}{_ms(weak.waiting):>10}{weak.efficiency:>8.0%}{_bytes(weak.memory):>11}  {weak.binding}"
        )
    if any(row.weak.binding == "teachers' lists" for row in rows):
        lines.append(
            "teachers' lists are the bottleneck with the recipe's teachers.num_servers; try as many servers as workers"
        )
    return lines


def span(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for unit, name in ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 or not seconds else _ms(seconds)


def _memory_lines(memories: Sequence[WorkerMemory], chosen: int, available: float) -> list[str]:
    columns = {
        "weights": 10,
        "gradients": 11,
        "moments": 10,
        "copies": 10,
        "frozen": 10,
        "activations": 13,
        "process": 10,
    }
    head = f"{'memory':<11}" + "".join(f"{name:>{width}}" for name, width in {**columns, "total": 11}.items())
    lines = [f"{head}   of {_bytes(available)}"]
    for memory in memories:
        sizes = memory.described
        parts = (f"{_bytes(sizes[name]):>{width}}" for name, width in {**columns, "total": 11}.items())
        line = f"{f'ZeRO {memory.stage}':<11}" + "".join(parts)
        lines.append(line + ("   this recipe" if memory.stage == chosen else ""))
    return lines


def _assumptions(cluster: Cluster, others: Sequence[str], shapes: Sequence[Shape]) -> list[str]:
    machine = cluster.machine
    rates = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in sorted(machine.matmul.items()))
    found = [
        f"{machine.name}: {machine.source}",
        f"rates: {rates}; memory {machine.bandwidth / 1e9:,.0f} GB/s; links {machine.link / 1e9:,.0f} GB/s, nodes "
        f"{cluster.network / 1e9:,.1f} GB/s one way",
        f"tables are read at {machine.table_read / 1e9:.2g} GB/s by one thread per server; hosts have "
        f"{_bytes(machine.host_memory)} per worker",
        f"checkpoints are written at {machine.disk / 1e9:.2g} GB/s"
        + (", while training continues" if machine.kind == "gpu" else "")
        + f"; a thread tokenizes {machine.tokenise:,.0f} texts/s",
        "gradients are sent during the backward pass, in buckets"
        if machine.kind == "gpu"
        else "collectives do not overlap with the backward pass",
        "rings for bytes, trees with 20 µs per hop for latency",
        *others,
        *dict.fromkeys(
            f"shape of {shape.name} from {shape.source}" for shape in shapes if shape.source != "config.json"
        ),
        _NOT_COUNTED,
    ]
    return [f"assumes    {line}" for line in found]


def _measured(plan: StudentPlan) -> list[str]:
    """Return lines on rates of passes that were not measured, or only on another machine."""
    machine = plan.cluster.machine
    missing = dict.fromkeys(
        f"width {work.shape.width} in {work.precision}"
        for work in plan.run.passes(plan.batch / plan.workers)
        if machine.factors and not machine.factors_of(work.training, work.precision, work.dropout, work.shape.width)[1]
    )
    notes = [f"passes of {', '.join(missing)} were not measured, only others: run with --calibrate"] if missing else []
    if plan.run.compiles_layers(machine, plan.workers):
        notes.append(
            f"compiled layers cause {COMPILED_TRAFFIC:g} of the memory traffic of others, as on an H100; compiling, up to a "
            "minute, is not counted"
        )
    return notes


def _shapes(plan: StudentPlan) -> list[Shape]:
    shapes = [plan.run.student, *(teacher.shape for teacher in plan.run.teachers), plan.run.generator]
    return [shape for shape in shapes if shape is not None]


def _machines(cluster: Cluster) -> str:
    if cluster.devices == 1:
        return cluster.machine.name
    return f"{cluster.nodes:,} node{'s' if cluster.nodes > 1 else ''} of {cluster.per_node:,} x {cluster.machine.name}"


def _teacher(plan: StudentPlan, number: int) -> str:
    teacher = plan.run.teachers[number]
    if teacher.shape is None:
        return f"{teacher.kind.section.backbone}, {teacher.kind.location}"
    shape = teacher.shape
    size = f"{shape.layers} layers of width {shape.width}, {shape.parameters / 1e6:.1f} M parameters"
    return f"{shape.name}, {size}, {teacher.kind.precision}, {teacher.work}"


def _count(number: float) -> str:
    return next(
        (f"{number / 10**power:,.2f} {name}" for power, name in ((12, "T"), (9, "G"), (6, "M")) if number >= 10**power),
        f"{number:,.0f}",
    )


def _bytes(size: float) -> str:
    units = ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"))
    return next((f"{size / 10**power:,.3g} {name}" for power, name in units if size >= 10**power), f"{size:.0f} B")


def _ms(seconds: float) -> str:
    seconds = round(seconds, 9)  # removes rounding errors of sums
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"
