"""Final evaluation of a mutual distillation: initial models, bi-encoders, cross-encoders and their ensembles.

The test sets may overlap with the training pairs; such scores are marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distcse.device import default_device
from distcse.evaluation import (
    SUITES,
    Candidate,
    Contamination,
    Ensemble,
    EvalConfig,
    Evaluation,
    ModelInfo,
    Tasks,
    collect,
    evaluate,
    make_candidate,
    make_pair_candidate,
    refuse_test_as_dev,
)
from distcse.events import Listener, StageProgress
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.pairs import Pairs
from distcse.experiments.mutual.phases import Kind
from distcse.models import CrossEncoder, Encoder, resolve_model
from distcse.recipe import MutualRecipe, decided


def wanted_tasks(recipe: MutualRecipe) -> Tasks:
    """Read the labelled sets of the final evaluation; empty without labelled data.

    Raises:
        EvaluationFormatError: A set is malformed.
    """
    selected = recipe.evaluation.final_suites
    if selected is None:
        selected = ["sts"] if recipe.evaluation.data else []
    suites = [suite for suite in SUITES if suite in selected]
    return collect(Path(str(recipe.evaluation.data)), suites, [], EvalConfig()) if suites else Tasks()


def checked_tasks(recipe: MutualRecipe) -> Tasks:
    """Read the labelled sets and the dev set, and check that they don't overlap unless evaluation.dev_is_test allows it.

    Raises:
        EvaluationError: A set is missing or malformed, or a model's record of contamination cannot be read.
        DistcseError: The dev set is also a test set.
    """
    tasks, dev = wanted_tasks(recipe), DevPairs.of(recipe)
    if dev is not None:
        refuse_test_as_dev(dev.first, dev.second, tasks, recipe.evaluation.dev_is_test)
    for group in recipe.groups if tasks.tasks else []:
        if Path(group.backbone).is_dir():
            Contamination.read(resolve_model(group.backbone))
    return tasks


def final_scores(
    recipe: MutualRecipe, tasks: Tasks, pairs: Pairs, best: Sequence[tuple[str, Kind, Path]], emit: Listener
) -> Evaluation | None:
    """Evaluate each group's initial and best models, and the ensemble of all groups for each formulation.

    Test sentences that were among the training pairs are recorded in the models' folders. Scores on such sets are
    transductive, and marked so in tables and model cards.

    Args:
        recipe: The run's recipe.
        tasks: The labelled sets to evaluate on.
        pairs: The pairs that the models were trained on.
        best: Group, formulation and folder of each best model.
        emit: Receives progress events.

    Returns:
        The evaluation; None without labelled sets.
    """
    contamination = Contamination.measure((*pairs.first, *pairs.second), [task.sentences() for task in tasks.tasks])
    for _, _, model in best:
        contamination.write(model)
    if not tasks.tasks:
        return None
    note = f"compared with {len(tasks.tasks)} sets: {contamination.describe}"
    emit(StageProgress("contamination", len(pairs), len(pairs), "pairs", finished=True, note=note))
    device, precision = default_device(), decided(recipe.evaluation.precision)
    candidates = []
    finished_groups = {name for name, _, _ in best}
    groups = {group.name: group for group in recipe.groups}
    for group in recipe.groups:
        if group.name in finished_groups:
            encoder = Encoder.from_section(group).to(device)
            known = Contamination.read(resolve_model(group.backbone))
            candidates.append(make_candidate(f"{group.name} start", group.backbone, encoder, known, precision))
    for kind in ("bi", "cross"):
        trained = []
        for name, model_kind, model in best:
            if model_kind != kind:
                continue
            title, group = f"{name} {kind}", groups[name]
            if kind == "bi":
                encoder = Encoder.load(model, is_fast=group.is_fast, trust_remote_code=group.trust_remote_code).to(
                    device
                )
                trained.append(make_candidate(title, str(model), encoder, contamination, precision))
            else:
                scorer = CrossEncoder.load(model, None, group.trust_remote_code, group.is_fast)
                trained.append(make_pair_candidate(title, str(model), scorer.to(device), contamination, precision))
        candidates += trained
        if len(trained) > 1:
            info = ModelInfo(f"{kind} ensemble", "mean of predictions", f"{kind}-encoders", "pair", 0, 0)
            ensemble = Ensemble([candidate.model for candidate in trained])
            candidates.append(Candidate(info, ensemble, contamination))
    settings = {"STS": "all", "device": device, "precision": precision}
    return evaluate(candidates, tasks, base=candidates[0].info.name, settings=settings, emit=emit)
