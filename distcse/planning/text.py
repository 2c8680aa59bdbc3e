"""A plan in words: its lines on the terminal, why it cannot run, and settings that would cost less."""

from __future__ import annotations

from typing import Any

from distcse.checks import gib
from distcse.planning.costs import FITS, STAGES, StudentPlan, Teacher
from distcse.planning.machines import Cluster
from distcse.planning.mutual import MutualPlan
from distcse.planning.sizes import Shape

ESTIMATE = (
    "estimates of a few formulas, within a factor of two of recorded runs; for better ones on this machine: --measure"
)
NOT_COUNTED = "not counted: start of Ray and imports, downloads, the final evaluation, other load on the machines"


def student_lines(plan: StudentPlan, problems: list[str]) -> list[str]:
    """Return a student's plan as lines, the shortest answer first: whether it can be done, how long it takes, what it holds."""
    machine, training, step = plan.cluster.machine, plan.recipe.training, plan.step
    mean, padded = plan.lengths.mean(plan.recipe.student.max_length), plan.padded(plan.batch / plan.workers)
    held = f"{size_text(plan.memory.total)} of {size_text(machine.memory)} per worker"
    short = f"{span(plan.seconds)}, {held}, {size_text(plan.disk_bytes)} of cache; bound by {step.binding}"
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in vars(plan.memory).items() if name != "stage")
    tables = ", ".join(f"{name} {size_text(size)}" for name, size in plan.tables.items()) or "none"
    shapes = [plan.student, *(teacher.shape for teacher in plan.teachers if teacher.shape), *plan.models]
    sources = dict.fromkeys(
        f"assumes    shape of {shape.name} from {shape.source}" for shape in shapes if shape.source != "config.json"
    )
    return [
        f"{plan.recipe.name} on {plan.cluster.spec}: {_describe_cluster(plan.cluster)}",
        f"in short   {f'IMPOSSIBLE: {problems[0]}' if problems else short}",
        "",
        f"student    {_describe_shape(plan.student)}; {plan.trained / 1e6:.1f} M are trained",
        *(f"teacher {n}  {_describe_teacher(teacher)}" for n, teacher in enumerate(plan.teachers)),
        f"text       {plan.rows:,} sentences; {mean:.1f} tokens on average, padded to {padded:.1f}",
        f"steps      {plan.steps:,} of {plan.batch} sentences on {plan.workers:,} worker{'s' if plan.workers > 1 else ''}, "
        f"{'two views' if plan.has_dropout else 'one pass for both views'}, {training.precision}, ZeRO {training.zero_stage}",
        "",
        f"{'phase':<20}{'time':>12}{'PFLOP':>12}   binds",
        *(
            f"{phase.name:<20}{span(phase.seconds):>12}{f'{phase.flops / 1e15:,.4g}' if phase.flops else '-':>12}   "
            f"{phase.binding}{f' ({phase.note})' if phase.note else ''}"
            for phase in plan.phases
        ),
        f"{'all':<20}{span(plan.seconds):>12}{sum(phase.flops for phase in plan.phases) / 1e15:>12,.4g}",
        "",
        f"step       {ms(plan.step_seconds)}: matrix products {ms(step.math)}, memory traffic {ms(step.traffic)}, host "
        f"{ms(step.host)}{' (overlapped)' if machine.kind == 'gpu' else ''}, network {ms(step.network)}, waiting for lists "
        f"{ms(step.waiting)}",
        f"binds      {step.binding}",
        f"tables     {tables}; total cache {size_text(plan.disk_bytes)}",
        f"memory     {size_text(plan.memory.total)} per worker, of {size_text(machine.memory)}: {parts}",
        f"host       {size_text(plan.host_bytes)} per worker for row order and checkpoints, of "
        f"{size_text(machine.host_memory)}",
        "",
        f"assumes    {ESTIMATE if plan.measured is None else plan.measured.note}",
        f"assumes    {machine.name}: rates of {machine.source}; nodes are connected at 100 Gbit/s",
        f"assumes    {plan.lengths.source}",
        *sources,
        f"assumes    {NOT_COUNTED}",
        *(f"advice     {line}" for line in student_advice(plan)),
        *(f"IMPOSSIBLE {problem}" for problem in problems),
    ]


def scaling_lines(rows: list[dict[str, Any]], machine: str) -> list[str]:
    """Return the cost of the same run on different numbers of devices as lines."""
    lines = [
        "",
        f"on more of {machine} (left: the recipe's batch over the workers, right: the recipe's batch on each of them)",
        f"{'devices':>8}{'teachers':>12}{'train':>7}{'step':>10}{'effic.':>8}{'student':>12} |"
        f"{'batch':>9}{'step':>10}{'effic.':>8}{'memory':>11}  binds",
    ]
    for row in rows:
        strong, weak = row["strong"], row["weak"]
        lines.append(
            f"{row['devices']:>8,}{span(row['teachers']):>12}{strong['workers']:>7,}{ms(strong['seconds']):>10}"
            f"{strong['efficiency']:>8.0%}{span(row['student']):>12} |{weak['batch']:>9,}{ms(weak['seconds']):>10}"
            f"{weak['efficiency']:>8.0%}{size_text(weak['memory']):>11}  {weak['binding']}"
        )
    return lines


def mutual_lines(plan: MutualPlan, problems: list[str]) -> list[str]:
    """Return a mutual distillation's plan as lines."""
    recipe, devices, machine = plan.recipe, plan.devices, plan.cluster.machine
    how = f"in parallel on {devices} device{'s' * (devices != 1)}" if recipe.ray else "one after the other"
    if plan.shared_workers is not None:
        how = f"on {devices} shared worker{'s' * (devices != 1)}"
    idle = f"idle       {plan.idle:.0%} of the devices' time: a phase ends with its slowest group"
    return [
        f"{recipe.name} on {plan.cluster.spec}: {_describe_cluster(plan.cluster)}",
        f"in short   {f'IMPOSSIBLE: {problems[0]}' if problems else span(plan.seconds)}",
        "",
        f"{plan.pairs:,} pairs, {recipe.mutual.cycles} cycles, {len(plan.shapes)} groups {how}",
        "",
        f"{'phase':<16}{'group':<12}{'steps':>8}{'training':>12}{'scoring':>12}{'PFLOP':>10}   binds",
        *(
            f"{stage.phase:<16}{stage.group:<12}{stage.steps:>8,}{span(stage.training):>12}{span(stage.scoring):>12}"
            f"{stage.flops / 1e15:>10,.3g}   {stage.binding}"
            for stages in plan.stages
            for stage in stages
        ),
        f"{'all':<16}{'':<12}{'':>8}{span(plan.seconds):>12}",
        "",
        *([idle] if recipe.ray else []),
        *(
            f"memory     {name}: {', '.join(f'{kind} {size_text(held.total)}' for kind, held in sorted(kinds.items()))} "
            "per worker, including its scorer"
            for name, kinds in plan.memories.items()
        ),
        f"host       {size_text(plan.driver_bytes)} in the driver for the pairs, of {size_text(machine.host_memory)}",
        "",
        f"assumes    {ESTIMATE}",
        f"assumes    {machine.name}: rates of {machine.source}",
        f"assumes    {plan.lengths.source}",
        f"assumes    {NOT_COUNTED}; mining and dev scores",
        *(f"IMPOSSIBLE {problem}" for problem in problems),
    ]


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
    available, host = FITS * machine.memory / sharing, machine.host_memory / sharing
    if plan.memory.total > available:
        found.append(
            f"a worker needs {gib(plan.memory.total)} at ZeRO stage {plan.memory.stage}, {machine.name} has "
            f"{gib(available)}; {_suggest_smaller(plan, available)}"
        )
    if plan.host_bytes > host:
        found.append(
            f"a worker's host has {gib(host)}, but needs {gib(plan.host_bytes)} for the order of {plan.rows:,} rows and "
            f"checkpoints of {plan.trained:,} parameters; take nodes with more memory, or write corpus.limit"
        )
    return found


def _suggest_smaller(plan: StudentPlan, available: float) -> str:
    """Return settings that make a worker fit into `available` bytes; each was checked."""

    def fits(workers: int, batch: int, stage: int) -> bool:
        return plan.memory_of(workers, batch, stage).total <= available

    workers, batch, own = plan.workers, plan.batch, plan.memory.stage
    stages = [stage for stage in STAGES[own + 1 :] if workers > 1 and fits(workers, batch, stage)]
    halves = (batch >> halved for halved in range(1, batch.bit_length()))
    smaller = (half for half in halves if half >= 2 and half % workers == 0 and fits(workers, half, own))
    more = (count for count in range(workers + 1, 4097) if batch % count == 0 and fits(count, batch, own))
    remedies = [f"training.zero_stage={stage}" for stage in stages[:1]]
    remedies += [f"training.batch_size={half}" for half in [next(smaller, None)] if half]
    remedies += [f"training.workers={count} on as many devices" for count in [next(more, None)] if count]
    return f"write {', or '.join(remedies)}" if remedies else "take a smaller backbone, or a larger device"


def student_advice(plan: StudentPlan) -> list[str]:
    """Return settings that would cost less, and settings that the plan does not follow."""
    found, recipe, machine = [], plan.recipe, plan.cluster.machine
    on_gpu = machine.kind == "gpu"
    if on_gpu and (recipe.gpu_mode == "none" or recipe.teachers.gpus_per_actor == 0):
        found.append("resources.gpu or teachers.gpus_per_actor selects CPUs; this plan assumes GPUs")
    if on_gpu and recipe.training.precision == "fp32" and "bf16" in machine.matmul:
        found.append("training.precision is fp32, but this GPU is faster in bf16; write training.precision=bf16")
    if idle := max(0, plan.cluster.devices - plan.workers - plan.others):
        found.append(
            f"{idle:,} of {plan.cluster.devices:,} devices do not train (batch {plan.batch}): "
            "use them with a larger batch, or with parallel trials or seeds"
        )
    own = plan.seconds_on(plan.workers)
    fewer = {count: plan.seconds_on(count) for count in range(1, plan.workers) if plan.batch % count == 0}
    best = min(fewer, key=lambda count: fewer[count], default=None)
    if best is not None and fewer[best] <= 0.9 * own:
        found.append(
            f"training.workers={best} takes {1e3 * fewer[best]:.3g} ms per step, {plan.workers} take {1e3 * own:.3g}: "
            "use fewer workers, and the other devices for trials or seeds"
        )
    if plan.step.binding == "host and launches":
        found.append("the host is the bottleneck: a larger batch hardly takes more time per step")
    if plan.step.binding == "teachers' lists":
        servers = max(2, recipe.teachers.num_servers * 2)
        found.append(f"teachers' lists are the bottleneck: try teachers.num_servers={servers} or more")
    return found


def mutual_problems(plan: MutualPlan) -> list[str]:
    """Return why a mutual distillation's plan cannot run, each with settings that fix it."""
    machine, recipe, found = plan.cluster.machine, plan.recipe, []
    for group, kinds in zip(recipe.groups, plan.memories.values(), strict=True):
        found += [
            f"group {group.name} needs {gib(held.total)} for its {kind}-encoder, more than {machine.name} has; "
            f"lower {recipe.loop_path(group, kind)}.batch_size, or raise workers of the group"
            for kind, held in kinds.items()
            if held.total > FITS * machine.memory
        ]
    if machine.kind == "cpu" and plan.cluster.nodes == 1 and not found and plan.bytes_at_once > FITS * machine.memory:
        found.append(
            f"all groups need {gib(plan.bytes_at_once)} together, more than {machine.name} has; lower cross.batch_size and "
            "bi.batch_size, or write ray=false: one group runs after the other"
        )
    gpus = sum(g.workers * (1.0 if g.gpus_per_worker is None else g.gpus_per_worker) for g in recipe.groups)
    if machine.kind == "gpu" and recipe.ray and plan.shared_workers is None and gpus > plan.cluster.devices:
        found.append(
            f"the groups' workers need {gpus:g} GPUs, and {plan.cluster.spec} has {plan.cluster.devices}; write "
            "mutual.shared_workers: auto, with which groups take turns, or set groups.N.gpus_per_worker"
        )
    if plan.driver_bytes > FITS * machine.host_memory:
        found.append(
            f"the driver needs {gib(plan.driver_bytes)} for {plan.pairs:,} pairs, more than a host has; write pairs.limit"
        )
    largest = max(recipe.groups, key=lambda group: recipe.bi_of(group).batch_size)
    if plan.pairs < recipe.bi_of(largest).batch_size:
        path = recipe.loop_path(largest, "bi")
        found.append(f"{plan.pairs:,} pairs are fewer than one batch; lower {path}.batch_size, or give more pairs")
    return found


def _describe_cluster(cluster: Cluster) -> str:
    if cluster.devices == 1:
        return cluster.machine.name
    return f"{cluster.nodes:,} node{'s' if cluster.nodes > 1 else ''} of {cluster.per_node:,} x {cluster.machine.name}"


def _describe_shape(shape: Shape) -> str:
    return f"{shape.name}, {shape.layers} layers of width {shape.width}, {shape.parameters / 1e6:.1f} M parameters"


def _describe_teacher(teacher: Teacher) -> str:
    if teacher.shape is None:
        return f"{teacher.kind.section.backbone}, {teacher.kind.location}"
    return f"{_describe_shape(teacher.shape)}, {teacher.kind.precision}, {teacher.work}"


def span(seconds: float) -> str:
    """Format seconds in a readable unit."""
    for unit, name in ((86400 * 365, "years"), (86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 or not seconds else ms(seconds)


def ms(seconds: float) -> str:
    """Format seconds in milliseconds."""
    seconds = round(seconds, 9)  # removes rounding errors of sums
    return f"{1e3 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.2f} s"


def size_text(size: float) -> str:
    """Format bytes in a readable unit."""
    units = ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "kB"))
    return next((f"{size / 10**power:,.3g} {name}" for power, name in units if size >= 10**power), f"{size:.0f} B")
