"""What a mutual distillation costs: training and scoring of every group in every phase, and the time that groups wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from distcse.checks import gib
from distcse.errors import CorpusTooSmallError, DistcseError
from distcse.events import Reporter
from distcse.planning.costs import FITS, PROCESS, Pass, step_terms, worker_memory
from distcse.planning.machines import PlannedCluster
from distcse.planning.sizes import Lengths, Shape, assumed_lengths, read_lengths, read_shape
from distcse.planning.text import ESTIMATE, NOT_COUNTED, Estimate, describe_cluster, size_text, span
from distcse.recipe import KINDS, MutualRecipe
from distcse.runs.mutual.pairs import fit_to_pairs, temporary_pairs
from distcse.runs.mutual.phase_store import Kind
from distcse.runs.mutual.processes import with_max_workers
from distcse.training.schedule import total_steps

_FILLED = 1.1
"""Tokens with padding over real ones: a batch is split into parts of similar length."""
_ASSUMED_PAIRS = 10_000


class Part(NamedTuple):
    """Cost of one group in a phase that trains one of its formulations."""

    group: str
    path: str
    """Recipe path of its training settings."""
    kind: Kind
    workers: int
    steps: int
    training: float
    """Seconds."""
    scoring: float
    """Seconds."""
    memory: float
    """Bytes of a worker that trains, with the scorer process next to it."""
    binding: str


@dataclass(frozen=True)
class _Groups:
    """The groups of a recipe and what they read."""

    recipe: MutualRecipe
    cluster: PlannedCluster
    shapes: list[dict[Kind, Shape]]
    """Shapes of each group's bi-encoder and cross-encoder."""
    lengths: Lengths
    pairs: int

    @classmethod
    def of(cls, recipe: MutualRecipe, cluster: PlannedCluster, rows: int | None) -> _Groups:
        """Read the groups' shapes and the number of pairs: `rows`, or the recipe's, those of its files, or 10,000."""
        if recipe.pairs.mine is not None:
            lengths = read_lengths(recipe.pairs.mine.corpus, recipe.groups[0], None)
            pairs = rows or recipe.pairs.mine.pairs
        else:
            counted = _count_pairs(recipe)
            pairs = rows or counted or recipe.pairs.limit or _ASSUMED_PAIRS
            why = "pairs in files are not tokenised for a plan"
            why += "" if rows or counted else f"; {pairs:,} pairs assumed: give --corpus-rows"
            lengths = assumed_lengths(2 * pairs, why)
        recipe = fit_to_pairs(with_max_workers(recipe, Reporter()), pairs)
        shapes: list[dict[Kind, Shape]] = []
        for group in recipe.groups:
            # The cross-encoder starts from another model, and reads the first token.
            cross = group.model_copy(update={"backbone": recipe.cross_start(group), "pooling": "cls"})
            shapes.append({"bi": read_shape(group), "cross": read_shape(cross)})
        return cls(recipe, cluster, shapes, lengths, pairs)

    def part(self, number: int, kind: Kind) -> Part:
        """Return the cost of a group in a phase that trains a formulation and scores all pairs with it."""
        recipe, group, machine = self.recipe, self.recipe.groups[number], self.cluster.machine
        section, shape = recipe.loop_of(group, kind), self.shapes[number][kind]
        rows = self.pairs * (2 if kind == "cross" and recipe.cross_of(group).both_orders else 1)
        steps = total_steps(section, max(1, rows // section.batch_size))
        work = self._pass(number, kind, section.batch_size / group.workers, True)
        step = step_terms([work], shape.parameters, self.cluster, group.workers, section)
        scored = self._pass(number, kind, self.pairs, False).batched_seconds(machine) / group.workers
        scorer = 4.0 * shape.parameters + (PROCESS if machine.kind == "cpu" else 0.0)
        saved = work.saved_bytes(machine.kind)
        memory = sum(worker_memory(shape.parameters, section.zero_stage, group.workers, scorer, saved).values())
        training = steps * step.seconds(machine.kind)
        path = recipe.loop_path(group, kind)
        return Part(group.name, path, kind, group.workers, steps, training, scored, memory, step.binding)

    def _pass(self, number: int, kind: Kind, pairs: float, training: bool) -> Pass:
        """Return a pass over pairs: a bi-encoder encodes each sentence, a cross-encoder both as one text."""
        group, shape = self.recipe.groups[number], self.shapes[number][kind]
        longest = self.recipe.cross_of(group).max_length if kind == "cross" else group.longest or 512
        lengths = self.lengths if kind == "bi" else self.lengths.pairs()
        length = lengths.mean(longest) * (_FILLED if training else 1.0)
        precision = self.recipe.loop_of(group, kind).precision if training else self.recipe.mutual.precision
        return Pass(shape, 2 * pairs if kind == "bi" else pairs, length, training, precision)


def plan_groups(recipe: MutualRecipe, cluster: PlannedCluster, rows: int | None) -> Estimate:
    """Estimate the cost of all groups over all cycles on a cluster; `rows` are the pairs, None for those of the recipe."""
    plan = _Groups.of(recipe, cluster, rows)
    recipe, machine, groups = plan.recipe, cluster.machine, range(len(plan.shapes))
    parts = {kind: [plan.part(number, kind) for number in groups] for kind in KINDS}
    shared = recipe.mutual.shared_workers if recipe.ray else None
    shared = cluster.devices if shared == "auto" else shared
    devices, how = 1, "one after the other"
    if recipe.ray:
        devices = shared or min(sum(group.workers for group in recipe.groups), cluster.devices)
        how = f"in parallel on {devices} devices" if shared is None else f"on {devices} shared workers"

    def cost(kind: Kind, trains: bool = True) -> tuple[float, float]:
        """Return the seconds of a phase, and those that its devices work: it ends with its slowest group."""
        each = [part.scoring + (part.training if trains else 0.0) for part in parts[kind]]
        if not recipe.ray:
            return sum(each), sum(each)
        work = sum(seconds * part.workers for seconds, part in zip(each, parts[kind], strict=True)) / devices
        return max(work, *each), work

    # The start scores with the bi-encoders; each cycle then trains and scores both.
    phases = [cost("bi", trains=False), *recipe.mutual.cycles * [cost("cross"), cost("bi")]]
    seconds = sum(spent for spent, _ in phases)
    idle = max(0.0, 1 - sum(work for _, work in phases) / seconds)
    problems = _find_problems(plan, [part for kind in KINDS for part in parts[kind]], shared)
    lines = [
        f"{recipe.name} on {cluster.spec}: {describe_cluster(cluster)}",
        f"in short   {f'IMPOSSIBLE: {problems[0]}' if problems else span(seconds)}",
        "",
        f"{plan.pairs:,} pairs, {recipe.mutual.cycles} cycles, {len(groups)} groups {how}; in a cycle:",
        f"{'group':<12}{'phase':<8}{'steps':>8}{'training':>12}{'scoring':>12}{'memory':>11}   binds",
        *(
            f"{part.group:<12}{part.kind:<8}{part.steps:>8,}{span(part.training):>12}{span(part.scoring):>12}"
            f"{size_text(part.memory):>11}   {part.binding}"
            for kind in ("cross", "bi")
            for part in parts[kind]
        ),
        "",
        *([f"idle       {idle:.0%} of the devices' time: a phase ends with its slowest group"] if recipe.ray else []),
        f"assumes    {ESTIMATE}",
        f"assumes    {machine.name}: rates of {machine.source}",
        f"assumes    {plan.lengths.source}",
        f"assumes    {NOT_COUNTED}; mining and dev scores",
        *(f"IMPOSSIBLE {problem}" for problem in problems),
    ]
    described = {
        "recipe": recipe.name,
        "cluster": cluster.spec,
        "pairs": plan.pairs,
        "shared_workers": shared,
        "seconds": seconds,
        "idle": idle,
        "phases": [part._asdict() for kind in KINDS for part in parts[kind]],
        "problems": problems,
    }
    return Estimate(lines, described, problems)


def _find_problems(plan: _Groups, parts: Sequence[Part], shared: int | None) -> Sequence[str]:
    """Return why a plan cannot run, each with settings that fix it."""
    recipe, cluster = plan.recipe, plan.cluster
    found = [
        f"group {part.group} needs {gib(part.memory)} for its {part.kind}-encoder, more than {cluster.machine.name} has; "
        f"lower {part.path}.batch_size, or raise workers of the group"
        for part in parts
        if part.memory > FITS * cluster.machine.memory
    ]
    gpus = sum(g.workers * (1.0 if g.gpus_per_worker is None else g.gpus_per_worker) for g in recipe.groups)
    if cluster.machine.kind == "gpu" and recipe.ray and shared is None and gpus > cluster.devices:
        found.append(
            f"the groups' workers need {gpus:g} GPUs, and {cluster.spec} has {cluster.devices}; write "
            "mutual.shared_workers: auto, with which groups take turns, or set groups.N.gpus_per_worker"
        )
    return found


def _count_pairs(recipe: MutualRecipe) -> int | None:
    """Count the pairs in the recipe's files; None if they cannot be read. Raises `CorpusTooSmallError`."""
    try:
        with temporary_pairs(recipe) as pairs:
            return len(pairs)
    except CorpusTooSmallError:
        raise
    except DistcseError:
        return None
