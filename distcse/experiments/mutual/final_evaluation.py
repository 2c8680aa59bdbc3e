"""The scores at the end: starts, bi-encoders, cross-encoders and their ensembles, on text that may have been learned from."""

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
    candidate_of,
    collect,
    evaluate,
    refuse_test_as_dev,
    scorer_of,
)
from distcse.events import Listener, StageProgress
from distcse.experiments.mutual.dev_pairs import DevPairs
from distcse.experiments.mutual.pairs import Pairs
from distcse.experiments.mutual.phases import Kind
from distcse.models import CrossEncoder, Encoder, resolve_model
from distcse.recipe import MutualRecipe, decided


def wanted_tasks(recipe: MutualRecipe) -> Tasks:
    """The labelled sets of the end, read at the beginning; none where there is no data."""
    wanted = recipe.evaluation.final_suites
    if wanted is None:
        wanted = ["sts"] if recipe.evaluation.data else []
    suites = [suite for suite in SUITES if suite in wanted]
    return collect(Path(str(recipe.evaluation.data)), suites, [], EvalConfig()) if suites else Tasks()


def checked_tasks(recipe: MutualRecipe) -> Tasks:
    """The same, held against the dev set: what chooses is not measured on unless the recipe says so. Reads both.

    Raises:
        DistcseError: One of them is missing or malformed, or the dev set is a test set.
    """
    tasks, dev = wanted_tasks(recipe), DevPairs.of(recipe)
    if dev is not None:
        refuse_test_as_dev(dev.first, dev.second, tasks, recipe.evaluation.dev_is_test)
    return tasks


def final_scores(
    recipe: MutualRecipe, tasks: Tasks, pairs: Pairs, best: Sequence[tuple[str, Kind, Path]], post: Listener
) -> Evaluation | None:
    """Measure every group's start and best models, and for each formulation the ensemble of all groups.

    What the models were trained on is compared with every test set and noted in their folders: figures on sets whose
    sentences were among the pairs are transductive, and are marked so in every table and card.
    """
    exposure = Contamination.measure((*pairs.first, *pairs.second), [task.sentences() for task in tasks.tasks])
    for _, _, model in best:
        exposure.write(model)
    if not tasks.tasks:
        return None
    note = f"compared with {len(tasks.tasks)} sets: {exposure.describe}"
    post(StageProgress("exposure", len(pairs), len(pairs), "pairs", finished=True, note=note))
    device, precision = default_device(), decided(recipe.evaluation.precision)
    candidates = []
    left = {name for name, _, _ in best}
    trusted = {group.name: group.trust_remote_code for group in recipe.groups}
    for group in recipe.groups:
        if group.name in left:
            encoder = Encoder.from_section(group).to(device)
            known = Contamination.read(resolve_model(group.backbone))
            candidates.append(candidate_of(f"{group.name} start", group.backbone, encoder, known, precision))
    for kind in ("bi", "cross"):
        ours = []
        for name, made, model in best:
            if made != kind:
                continue
            title = f"{name} {kind}"
            if kind == "bi":
                encoder = Encoder.load(model, trust_remote_code=trusted[name]).to(device)
                ours.append(candidate_of(title, str(model), encoder, exposure, precision))
            else:
                scorer = CrossEncoder.load(model, trust_remote_code=trusted[name]).to(device)
                ours.append(scorer_of(title, str(model), scorer, exposure, precision))
        candidates += ours
        if len(ours) > 1:
            about = ModelInfo(f"{kind} ensemble", "mean of predictions", f"{kind}-encoders", "pair", 0, 0)
            candidates.append(Candidate(about, Ensemble([one.model for one in ours]), exposure))
    settings = {"STS": "all", "device": device, "precision": precision}
    return evaluate(candidates, tasks, base=candidates[0].about.name, settings=settings, post=post)
