"""Training of one group's bi- or cross-encoder in one phase."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch

from distcse.devices.distributed import barrier, rank, world_size
from distcse.errors import CheckpointError, OutOfMemoryError
from distcse.events import Reporter, ignore
from distcse.models import CrossEncoder, Encoder
from distcse.models.student import WeightInterpolation
from distcse.recipe import GroupSection, decided
from distcse.runs.mutual.dev_pairs import DevPairs
from distcse.runs.mutual.pair_task import BiTokens, CrossTokens, PairTask, PairTokens
from distcse.runs.mutual.phase_store import StoredScores
from distcse.runs.mutual.phases import GroupContext, Kind, Phase, PhaseResult
from distcse.storage import ArtifactStore, open_store
from distcse.text import PairTokenTable, TokenTable
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

        Args:
            phase: The phase; one that has already finished returns its result at once.
            labels: The labels of the pairs.
            reporter: Receives the training's events.
            passes: Forward passes per step; see `PairTask`. Default: one.

        Returns:
            The result; None if the run was asked to stop.

        Raises:
            DivergedError: A loss or dev score is not finite.
            CheckpointError: The result of the phase cannot be read.
            OutOfMemoryError: A step needs more memory than the device has.
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
        checkpoints, section = CheckpointStore(folder, context.run.guard), context.section(kind)
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
            store = open_store(folder, context.run.guard)
            _save_best(self._initial_model(phase), checkpoints, store, result.steps, context.group.init_weight_mix)
        barrier()
        return _load_result(folder)

    def _graph_mode(self, phase: Phase, encoder: Encoder | CrossEncoder, reporter: Reporter) -> GraphMode:
        """Return whether to record the steps of a phase; said for the group's first phases alone."""
        section, group = self._context.section(phase.kind), self._context.group
        key = self._context.recipe.loop_path(group, phase.kind)
        changes = [f"{key}.{change}" for change in section.changes_to_record]
        if group.rng_streams > 1:
            changes.append(f"{'workers: 1' if group.workers > 1 else 'max_workers: null'} in group {group.name}")
        backbone = encoder.backbone if isinstance(encoder, Encoder) else encoder.model
        emit = reporter.emit if phase.cycle <= 1 else ignore
        return graph_mode(section.cuda_graphs, changes, backbone, group.backbone, key, emit)

    def _tokens(self, encoder: Encoder | CrossEncoder) -> PairTokens:
        tokens = self._context.tokens
        if isinstance(encoder, Encoder):
            return BiTokens(encoder, self._context.pairs, TokenTable.open(tokens["bi"].path))
        return CrossTokens(encoder, PairTokenTable.open(tokens["cross"].path))

    @cached_property
    def _dev(self) -> DevPairs | None:
        return DevPairs.of(self._context.recipe)

    def _initial_model(self, phase: Phase) -> Encoder | CrossEncoder:
        """Load the model with which a phase starts: the previous phase's, or the group's. New weights use the phase's seed."""
        torch.manual_seed(self._context.seed(phase))
        recipe, group = self._context.recipe, self._context.group
        previous = Phase(phase.number - 1)
        is_sequential = recipe.mutual.initialization == "sequential" and previous.number > 0
        model = str(self._context.folder(previous) / "model")
        layers = None if is_sequential else group.named_layers
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
    """Save the best checkpoint as the phase's model, and write `result.json`, before deleting the checkpoints.

    Args:
        encoder: The phase's initial model.
        checkpoints: The phase's checkpoints.
        store: The folder of the phase.
        steps: Number of steps of the training.
        init_weight_mix: Weight of the initial parameters in a saved bi-encoder.
    """
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
    result = PhaseResult(str(store.path / "model"), state.step, dev, steps)
    store.write_json("result.json", asdict(result))
    (store / "checkpoints").delete_all()


def _load_result(folder: Path) -> PhaseResult | None:
    """Load the result of a finished phase; None if the phase has not finished."""
    store = open_store(folder)
    try:
        result = store.read_json("result.json")
    except (OSError, ValueError) as broken:
        raise CheckpointError(
            f"{store}/result.json cannot be read: {broken}; delete {store} and --resume to repeat the phase"
        ) from None
    return None if result is None else replace(PhaseResult(**result), model=str(folder / "model"))


def load_trained(group: GroupSection, kind: Kind, folder: Path) -> Encoder | CrossEncoder:
    """Load a model that a group has trained."""
    if kind == "cross":
        return CrossEncoder.load(folder, None, group.trust_remote_code)
    return Encoder.load(folder, trust_remote_code=group.trust_remote_code)
