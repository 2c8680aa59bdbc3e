"""Training of a group's bi- or cross-encoder in a phase, and scoring of the run's pairs with it, in shards that are stored."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.devices.device import default_device, is_gpu
from distcse.devices.distributed import barrier, rank, world_size
from distcse.errors import CheckpointError, NotFiniteError, OutOfMemoryError
from distcse.evaluation import Dev, read_dev
from distcse.evaluation.models import Progress
from distcse.events import Reporter, StageProgress, ignore
from distcse.models import CrossEncoder, Encoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.student import WeightInterpolation
from distcse.recipe import GroupSection, decided
from distcse.runs.mutual.pair_task import PairTask, PairTokens, pair_model
from distcse.runs.mutual.phase_store import GroupContext, Kind, Phase, PhaseResult, ScoreShards, StoredScores
from distcse.storage import ArtifactStore
from distcse.text import Pairs, PairTokenTable, TokenTable
from distcse.training.checkpoint_files import load_trainer_state, load_weights
from distcse.training.checkpoints import CheckpointStore
from distcse.training.cuda_graphs import GraphMode, graph_mode
from distcse.training.trainer import train


class PhaseTrainer:
    """Trains a group's models; one of several distributed workers, or the only one."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context

    def prepare(self, phase: Phase) -> None:
        """Fetch the tokens and read the dev pairs, which needs no labels."""
        self._context.tokens[phase.kind].fetch_folder()
        _ = self._dev

    def train(self, phase: Phase, labels: StoredScores, reporter: Reporter, passes: int = 1) -> PhaseResult | None:
        """Train the model of a phase, from its latest checkpoint if there is one.

        The folder of the phase then has the best model and `result.json`; its checkpoints are deleted.

        Returns:
            The result; None if the run was asked to stop.
        """
        context, kind = self._context, phase.kind
        folder = context.folder(phase)
        if (done := _load_result(folder)) is not None:
            return done
        self.prepare(phase)
        encoder = self._initial_model(phase)
        task = PairTask(
            encoder,
            self._tokens(encoder),
            labels.read(),
            context.section(kind),
            self._dev,
            context.recipe.evaluation.eval_steps,
            context.seed(phase),
            rank(),
            world_size(),
            decided(context.recipe.evaluation.precision),
            passes,
            context.group.rng_streams,
            context.group.init_weight_mix,
            reporter,
        )
        checkpoints, section = CheckpointStore(folder), context.section(kind)
        key = context.recipe.loop_path(context.group, kind)
        cuda_graphs = "off" if passes > 1 else self._graph_mode(phase, encoder, reporter)
        try:
            result = train(task, section, checkpoints, reporter, cuda_graphs=cuda_graphs, key=key)
        except OutOfMemoryError as error:
            pairs = -(-task.rows_per_stream // passes)
            place = f"group {context.group.name}, {phase.name}, {pairs} pair{'s' * (pairs != 1)} per forward pass"
            raise OutOfMemoryError(f"{place}: {error}") from None
        if result.interrupted:
            return None
        if rank() == 0:
            _save_best(self._initial_model(phase), checkpoints, folder, result.steps, context.group.init_weight_mix)
        barrier()
        return _load_result(folder)

    def _graph_mode(self, phase: Phase, encoder: Encoder | CrossEncoder, reporter: Reporter) -> GraphMode:
        """Return whether to record the steps of a phase; said for the group's first phases alone."""
        section, group = self._context.section(phase.kind), self._context.group
        key = self._context.recipe.loop_path(group, phase.kind)
        changes = [f"{key}.{change}" for change in section.changes_to_record]
        if group.rng_streams > world_size():
            changes.append(f"max_workers: null in group {group.name}")
        backbone = encoder.backbone if isinstance(encoder, Encoder) else encoder.model
        emit = reporter.emit if phase.cycle <= 1 else ignore
        return graph_mode(section.cuda_graphs, changes, backbone, group.backbone, key, emit)

    def _tokens(self, encoder: Encoder | CrossEncoder) -> PairTokens:
        tokens = self._context.tokens
        if isinstance(encoder, Encoder):
            return PairTokens.bi(encoder, self._context.pairs, TokenTable.open(tokens["bi"]))
        return PairTokens.cross(encoder, PairTokenTable.open(tokens["cross"]))

    @cached_property
    def _dev(self) -> Dev | None:
        return read_dev(self._context.recipe)

    def _initial_model(self, phase: Phase) -> Encoder | CrossEncoder:
        """Load the model with which a phase starts: the previous phase's, or the group's. New weights use the phase's seed."""
        torch.manual_seed(self._context.seed(phase))
        recipe, group = self._context.recipe, self._context.group
        previous = Phase(phase.number - 1)
        is_sequential = recipe.mutual.initialization == "sequential" and previous.number > 0
        model = str((self._context.folder(previous) / "model").path)
        layers = None if is_sequential else group.layers
        if phase.kind == "bi":
            encoder = Encoder.from_section(group)
            if not is_sequential:
                return encoder
            # The folder of a cross-encoder has no pooling, head or normalization: take the bi-encoder's.
            settings = {"pooling": encoder.pooling, "prompt": encoder.prompt, "max_length": encoder.max_length}
            converted = Encoder.from_section(group.model_copy(update={"backbone": model, "layers": None, **settings}))
            converted.head, converted.normalize = encoder.head, encoder.normalize
            converted.take_settings(encoder)
            return converted
        source = model if is_sequential else recipe.cross_start(group)
        length, trusts_code = recipe.cross_of(group).max_length, group.trust_remote_code
        return CrossEncoder.fresh(source, length, layers, group.dropout, trusts_code)


def _save_best(
    encoder: Encoder | CrossEncoder,
    checkpoints: CheckpointStore,
    store: ArtifactStore,
    steps: int,
    init_weight_mix: float,
) -> None:
    """Save the best checkpoint as the phase's model, and write `result.json`, before deleting the checkpoints."""
    best = checkpoints.best() or checkpoints.latest()
    if best is None:
        raise CheckpointError(f"{store} has no checkpoint")
    state = load_trainer_state(best)
    weights = {name.removeprefix("encoder."): weight for name, weight in load_weights(best).items()}
    if isinstance(encoder, Encoder):
        weights = WeightInterpolation(encoder, init_weight_mix).interpolate(weights)
    encoder.load_state_dict(weights)
    encoder.eval().save(store / "model")
    dev = dict(state.scores).get(state.step)
    result = PhaseResult(state.step, dev, steps)
    store.write_json("result.json", asdict(result))
    (store / "checkpoints").delete_all()


def _load_result(folder: ArtifactStore) -> PhaseResult | None:
    """Load the result of a finished phase; None if the phase has not finished."""
    try:
        result = folder.read_json("result.json")
    except (OSError, ValueError) as broken:
        raise CheckpointError(
            f"{folder}/result.json cannot be read: {broken}; delete {folder} and --resume to repeat the phase"
        ) from None
    return None if result is None else PhaseResult(**result)


def load_trained(group: GroupSection, kind: Kind, folder: Path) -> Encoder | CrossEncoder:
    """Load a model that a group has trained."""
    if kind == "cross":
        return CrossEncoder.load(folder, None, group.trust_remote_code)
    return Encoder.load(folder, trust_remote_code=group.trust_remote_code)


PAIRS_PER_SHARD = {"cpu": 10_000, "gpu": 100_000}
"""Pairs that are scored and stored together: seconds to minutes of work, next to milliseconds for a file or an upload. They also
limit the vectors in memory. A repeated sentence is encoded once per shard."""
REPORT_S = 5.0
"""Seconds between two reports of progress."""


class PairScorer:
    """Scores the run's pairs with the best model of a phase."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context

    def score(
        self, phase: Phase, part: int = 0, parts: int = 1, on_progress: Progress | None = None
    ) -> NDArray[np.float32]:
        """Score one part of the pairs, in their order, except shards that are stored already.

        Shards do not depend on the number of parts, if that is at most the group's random streams. The pairs of a shard share
        forward passes, so any number of parts computes the same scores.

        Returns:
            One score per pair: raw cosines of a bi-encoder, or sigmoid outputs of a cross-encoder.
        """
        context = self._context
        size = PAIRS_PER_SHARD["gpu" if is_gpu(default_device()) else "cpu"]
        bounds = _shard_bounds(len(self._pairs), max(context.group.rng_streams, parts), part, parts, size)
        first, end = bounds[0], bounds[-1]
        scores = np.empty(end - first, dtype=np.float32)
        report = on_progress or (lambda done, total: None)
        report(0, len(scores))
        shards = ScoreShards(context.run, context.group.name, phase)
        model: Encoder | CrossEncoder | None = None
        for begin, stop in pairwise(bounds):
            shard = shards.read(begin, stop)
            if shard is None:
                model = model or self._model(phase)
                texts = self._pairs.texts(begin, stop)
                shard = self.score_shard(model, phase, *texts, _in_part(report, begin - first, len(scores)))
                shards.write(begin, shard)
            scores[begin - first : stop - first] = shard
            report(stop - first, len(scores))
        return scores

    def score_shard(
        self,
        model: Encoder | CrossEncoder,
        phase: Phase,
        first: Sequence[str],
        second: Sequence[str],
        on_progress: Progress,
    ) -> NDArray[np.float32]:
        def before_the_last(done: int, total: int) -> None:  # the shard is stored first
            if done < total:
                on_progress(len(first) * done // total, len(first))

        scorer = pair_model(model, decided(self._context.recipe.mutual.precision), before_the_last)
        scores = scorer.similarities(first, second).astype(np.float32)
        if not_finite := int((~np.isfinite(scores)).sum()):
            group = self._context.group.name
            raise NotFiniteError(
                f"group {group}, {phase.name}: {not_finite:,} of {len(scores):,} scores are NaN or infinite; write "
                "mutual.precision: fp32, or lower the learning rate"
            )
        return scores

    @cached_property
    def _pairs(self) -> Pairs:
        # Not in the constructor: reading can hang, and an actor has no heartbeat before its constructor returns.
        return self._context.pairs

    def _model(self, phase: Phase) -> Encoder | CrossEncoder:
        group, folder = self._context.group, self._context.folder(phase) / "model"
        model = load_trained(group, phase.kind, folder.path) if phase.number else Encoder.from_section(group)
        model = model.to(default_device())
        use_mkldnn_linear(model, decided(self._context.recipe.mutual.precision))
        return model


class ScoringProgress:
    """Reports the number of scored pairs, at most every five seconds.

    Args:
        reporter: Receives a `StageProgress`.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._due_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether a report is due."""
        return time.monotonic() >= self._due_at

    def report(self, done: int, total: int | None) -> None:
        """Report `done` of `total` pairs; None if the total is unknown."""
        self._due_at = time.monotonic() + REPORT_S
        self._reporter.emit(StageProgress("scoring", done, total, "pairs"))


def _shard_bounds(pairs: int, ranges: int, part: int, parts: int, size: int) -> list[int]:
    """Return where a part's shards begin, and where the last one ends."""
    edges = [pairs * number // ranges for number in range(ranges * part // parts, ranges * (part + 1) // parts + 1)]
    return [*(begin for low, high in pairwise(edges) for begin in range(low, high, size)), edges[-1]]


def _in_part(report: Progress, before: int, total: int) -> Progress:
    """Return a progress function of a shard's pairs that reports the part's: `before` are those of earlier shards."""
    return lambda done, _: report(before + done, total)
