"""What one group does in one phase, wherever it does it: train a formulation, score the pairs with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.device import default_device
from distcse.errors import CheckpointError, NotFiniteError
from distcse.evaluation.models import Progress
from distcse.events import Reporter
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.pairs import Pairs
from distcse.experiments.mutual.phases import Kind, Phase
from distcse.experiments.mutual.task import BiTokens, CrossTokens, PairTask, pair_model
from distcse.files import dump_checked_json, load_checked_json
from distcse.models import CrossEncoder, Encoder
from distcse.models.fast.mkldnn_linear import use_mkldnn_linear
from distcse.recipe import GroupSection, LoopSection, MutualRecipe, decided
from distcse.runs.lease import Lease
from distcse.storage import fetch, remove, write_text_atomic
from distcse.trainer.checkpoints import CheckpointStore, load_model_state, load_trainer_state
from distcse.trainer.distributed import barrier, rank, world_size
from distcse.trainer.dropout_rng import dropout_seed
from distcse.trainer.trainer import train

_SLICE = 200_000
"""Pairs whose vectors are held at a time; sentences of several pairs are encoded once in each slice."""


@dataclass(frozen=True)
class PhaseResult:
    """What a phase leaves behind."""

    model: str
    """Folder of the best model of the phase."""
    step: int
    dev: float | None
    """Its dev score; None where nothing picks."""
    steps: int
    """Steps of the phase."""


@dataclass(frozen=True)
class GroupContext:
    """All that a group's worker or scorer is told; the folder is on storage that every one of them sees."""

    recipe: MutualRecipe
    number: int
    """Of the group, in the recipe."""
    run: Path
    lease: Lease
    """The right to write in `run`."""

    @property
    def group(self) -> GroupSection:
        """The group's part of the recipe."""
        return self.recipe.groups[self.number]

    @property
    def pairs_file(self) -> Path:
        """The run's pairs."""
        return self.run / "pairs.parquet"

    def folder(self, phase: Phase) -> Path:
        """Where a phase of this group is kept."""
        return self.run / "groups" / self.group.name / phase.name

    def section(self, kind: Kind) -> LoopSection:
        """How this formulation is trained."""
        return self.recipe.bi if kind == "bi" else self.recipe.cross

    def seed(self, phase: Phase) -> int:
        """Of fresh weights, order and noise in a phase: another for every group and phase."""
        return dropout_seed(self.recipe.seed, phase.number, self.number) % 2**31


class PhaseTrainer:
    """A group's training worker: one of several that train together, or the only one."""

    def __init__(self, bench: GroupContext) -> None:
        self._bench = bench
        self._tokens: dict[Kind, BiTokens | CrossTokens] = {}

    def prepare(self, phase: Phase) -> None:
        """What can be done before the labels are there: the pairs tokenised, dev pairs read."""
        if phase.kind not in self._tokens:
            encoder = self._start(phase)
            self._tokens[phase.kind] = (
                BiTokens(encoder, self._pairs)
                if isinstance(encoder, Encoder)
                else CrossTokens(encoder, self._pairs, self._bench.recipe.cross.both_orders)
            )
        _ = self._dev

    def train(self, phase: Phase, labels: NDArray[np.float32], reporter: Reporter) -> PhaseResult | None:
        """Train a formulation from its start, or go on from its last checkpoint; None when the run was asked to stop.

        The phase's best model is left in its folder, beside what is told of it; checkpoints go when it is there.

        Raises:
            RunError: A loss is not finite.
        """
        bench, kind = self._bench, phase.kind
        folder = bench.folder(phase)
        if (done := _told(folder)) is not None:
            return done
        self.prepare(phase)
        encoder = self._start(phase)
        task = PairTask(
            encoder,
            self._tokens[kind],
            labels,
            bench.section(kind),
            self._dev,
            bench.recipe.evaluation.eval_steps,
            bench.seed(phase),
            rank(),
            world_size(),
            decided(bench.recipe.evaluation.precision),
        )
        checkpoints = CheckpointStore(folder, bench.lease)
        outcome = train(task, bench.section(kind), checkpoints, reporter)
        if outcome.interrupted:
            return None
        if rank() == 0:
            bench.lease.check()
            _keep_best(self._start(phase), checkpoints, folder, outcome.steps)
        barrier()
        return _told(folder)

    @cached_property
    def _pairs(self) -> Pairs:
        return Pairs.read(self._bench.pairs_file)

    @cached_property
    def _dev(self) -> DevPairs | None:
        return DevPairs.of(self._bench.recipe)

    def _start(self, phase: Phase) -> Encoder | CrossEncoder:
        """What a phase begins with; fresh weights are drawn from the phase's seed."""
        torch.manual_seed(self._bench.seed(phase))
        group, cross = self._bench.group, self._bench.recipe.cross
        before = Phase(phase.number - 1)
        follows = self._bench.recipe.mutual.initialization == "sequential" and before.number > 0
        model = str(self._bench.folder(before) / "model")
        layers = None if follows else group.named_layers
        if phase.kind == "bi":
            start = Encoder.from_section(group)
            if not follows:
                return start
            # A cross-encoder's folder does not say how a bi-encoder pools, nor what follows.
            known = {"pooling": start.pooling, "prompt": start.prompt, "max_length": start.max_length}
            taken = Encoder.from_section(group.model_copy(update={"backbone": model, "layers": None, **known}))
            taken.head, taken.normalize = start.head, start.normalize
            return taken
        source = model if follows else group.cross_backbone or group.backbone
        return CrossEncoder.fresh(source, cross.max_length, layers, group.dropout, group.trust_remote_code)


class PairScorer:
    """Scores pairs with the best model of a phase."""

    def __init__(self, bench: GroupContext) -> None:
        self._bench = bench
        self._pairs = Pairs.read(bench.pairs_file)

    def score(
        self, phase: Phase, part: int = 0, parts: int = 1, on_progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Scores of one part of the pairs, in one order: raw cosines, or sigmoid outputs.

        Args:
            phase: Whose best model scores.
            part: Number of this part, from 0.
            parts: Number of parts.
            on_progress: Called after every forward pass; what it raises ends the scoring.

        Raises:
            EncoderError: A score is not finite.
        """
        model = self._model(phase).to(default_device())
        precision = decided(self._bench.recipe.mutual.precision)
        use_mkldnn_linear(model, precision)
        begin, end = (len(self._pairs) * edge // parts for edge in (part, part + 1))
        scores = np.empty(end - begin, dtype=np.float32)
        for here in range(begin, end, _SLICE):
            mine = self._pairs[here : min(end, here + _SLICE)]
            scorer = pair_model(model, precision, on_progress)
            found = scorer.similarities(mine.first, mine.second)
            scores[here - begin : here - begin + len(mine)] = found
        if broken := int((~np.isfinite(scores)).sum()):
            group = self._bench.group.name
            raise NotFiniteError(f"group {group}, {phase.name}: {broken:,} of {len(scores):,} scores are no numbers")
        return scores

    def _model(self, phase: Phase) -> Encoder | CrossEncoder:
        group = self._bench.group
        if not phase.number:
            return Encoder.from_section(group)
        folder = self._bench.folder(phase) / "model"
        if phase.kind == "cross":
            return CrossEncoder.load(folder, trust_remote_code=group.trust_remote_code)
        return Encoder.load(folder, trust_remote_code=group.trust_remote_code)


def _keep_best(encoder: Encoder | CrossEncoder, checkpoints: CheckpointStore, folder: Path, steps: int) -> None:
    best = checkpoints.best() or checkpoints.latest()
    if best is None:
        raise CheckpointError(f"{folder} has no checkpoint")
    position = load_trainer_state(best)
    weights = load_model_state(best).weights
    encoder.load_state_dict({name.removeprefix("encoder."): weight for name, weight in weights.items()})
    encoder.eval().save(folder / "model")
    dev = dict(position.scores).get(position.step)
    told = PhaseResult(str(folder / "model"), position.step, dev, steps)
    write_text_atomic(folder / "trained.json", dump_checked_json(asdict(told)))
    remove(folder / "checkpoints")


def _told(folder: Path) -> PhaseResult | None:
    file = folder / "trained.json"
    if not fetch(file):
        return None
    try:
        return replace(PhaseResult(**load_checked_json(file)), model=str(folder / "model"))
    except (OSError, ValueError) as broken:
        raise CheckpointError(
            f"{file} cannot be read ({broken}); remove {folder} and --resume: the phase is done again"
        ) from None
