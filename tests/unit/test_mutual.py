"""Mutual distillation: equality with the paper's loop, several groups and their settings, dropped groups, reports and resumes."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity

from distcse.devices.device import DeviceSpeed
from distcse.errors import (
    CorpusNotFoundError,
    DivergedError,
    EvaluationFormatError,
    FrozenKeyError,
    InvalidValueError,
    ModelFormatError,
    ModelNotFoundError,
    RunRecordError,
)
from distcse.evaluation import (
    LoadOptions,
    PairScores,
    RecordedScores,
    VectorModel,
    open_candidate,
    read_dev,
    read_table,
    sts_score,
)
from distcse.evaluation.tasks.sts import ScoredPairs
from distcse.events import DevScore, Event, GroupActivity, GroupEvent, Reporter, StageProgress, StepReport, ignore
from distcse.models import CrossEncoder, Encoder
from distcse.models.pooling import Dense
from distcse.models.st_format import DenseShape
from distcse.preflight.precision import decide_precisions
from distcse.recipe import MutualRecipe, read_recipe
from distcse.report.card import write_cards
from distcse.report.history import read_run
from distcse.report.page import html, markdown
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.mutual.pair_task import BiPairs, CrossPairs
from distcse.runs.mutual.phase_store import GroupContext, Phase, PhaseStore
from distcse.runs.mutual.preflight import score_starts
from distcse.runs.mutual.processes import roles_on
from distcse.runs.result import MutualResult
from distcse.storage import dump_checked_json, load_checked_json, open_store
from distcse.text import BatchSampler, Pairs
from distcse.training.dropout_rng import dropout_seed
from distcse.training.schedule import warmup_then_linear
from tests.backends import resume_mutual, run_mutual
from tests.failures import fails_with
from tests.models import make_encoder
from tests.pairs import bi_tokens, cross_tokens, labels_of, make_mutual_recipe, make_pairs

MakeRecipe = Callable[..., MutualRecipe]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    folder = tmp_path_factory.mktemp("alone")
    return lambda *overrides: make_mutual_recipe(folder, {"bert": tiny("bert")}, sentences, *overrides)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    folder, models = tmp_path_factory.mktemp("both"), {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(folder, models, sentences, *overrides)


class Finished(NamedTuple):
    """A run, and the events that it has emitted."""

    result: MutualResult
    events: list[Event]

    @property
    def path(self) -> Path:
        return self.result.directory.path

    @property
    def store(self) -> PhaseStore:
        return PhaseStore(open_store(self.path))


def finish(recipe: MutualRecipe) -> Finished:
    events: list[Event] = []
    return Finished(run_mutual(recipe, Reporter(events.append)), events)


@pytest.fixture(scope="module")
def one_group(alone: MakeRecipe) -> Finished:
    """Two cycles of a group without dropout."""
    return finish(alone("groups.0.dropout=0.0", "evaluation.eval_steps=4"))


@pytest.fixture(scope="module")
def two_groups(both: MakeRecipe) -> Finished:
    """Two cycles of two groups, of which one has a greater weight and separate settings; reported without labeled sets."""
    own = ("groups.1.weight=3", "groups.1.bi.batch_size=8", "groups.1.cross.max_length=24")
    return finish(both(*own, "bi.epochs=1", "evaluation.eval_steps=4", "evaluation.final_suites=null"))


# -- the paper's loop -----------------------------------------------------------------------------------------------------


class PlainLoop:
    """The paper's self-distillation (references §4.1) in one process, in as few lines as possible."""

    def __init__(self, recipe: MutualRecipe, run: Path) -> None:
        self.recipe, self.context = recipe, GroupContext(recipe, 0, open_store(run), {})
        table = read_table(Path(str(recipe.pairs.path)))
        unique = dict.fromkeys(zip(table.texts("sentence1"), table.texts("sentence2"), strict=True))
        self.pairs = list(unique)
        self.dev = ScoredPairs.of("dev", read_table(Path(recipe.evaluation.dev)))

    def run(self) -> tuple[list[np.ndarray], list[float]]:
        """Return the labels of each phase, and the best dev score of each phase that trains."""
        bi = Encoder.from_section(self.recipe.groups[0]).eval()
        labels, devs = [self.cosines(bi)], []
        for cycle in range(1, self.recipe.mutual.cycles + 1):
            phase = Phase(2 * cycle - 1)
            torch.manual_seed(self.context.seed(phase))
            group = self.recipe.groups[0]
            cross = CrossEncoder.fresh(group.backbone, self.recipe.cross.max_length, dropout=group.dropout)
            swapped = [(second, first) for first, second in self.pairs]
            devs.append(self.fit(cross, [*self.pairs, *swapped], np.tile(labels[-1], 2), self.recipe.cross, phase))
            labels.append(cross.score(self.pairs).astype(np.float32))
            phase = Phase(2 * cycle)
            bi = Encoder.from_section(self.recipe.groups[0])
            devs.append(self.fit(bi, self.pairs, labels[-1], self.recipe.bi, phase))
            labels.append(self.cosines(bi))
        return labels, devs

    def cosines(self, encoder: Encoder) -> np.ndarray:
        first, second = (torch.from_numpy(encoder.encode([pair[n] for pair in self.pairs])) for n in (0, 1))
        return cosine_similarity(first.double(), second.double()).float().numpy()

    def fit(self, model, pairs, labels, section, phase) -> float:  # type: ignore[no-untyped-def]
        seed = self.context.seed(phase)
        sampler = BatchSampler(len(pairs), section.batch_size, seed)
        steps = round(section.epochs * sampler.steps_per_epoch)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        others = {"params": [parameter for parameter in model.parameters() if parameter.ndim == 1], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([{"params": matrices}, others], lr=section.lr, weight_decay=section.weight_decay)
        tokenize = partial(
            model.tokenizer, padding=True, truncation=True, max_length=model.max_length, return_tensors="pt"
        )
        best, best_weights = -1e9, {}
        for step in range(steps):
            model.train()
            rows = sampler.batch(step)
            targets = torch.from_numpy(labels[rows])
            torch.manual_seed(dropout_seed(seed, step, 0))
            if isinstance(model, Encoder):
                tokens = tokenize([pairs[row][0] for row in rows] + [pairs[row][1] for row in rows])
                first, second = model(tokens["input_ids"], tokens["attention_mask"]).chunk(2)
                loss = (cosine_similarity(first, second) - targets).square().mean()
            else:
                tokens = tokenize(*(list(side) for side in zip(*(pairs[row] for row in rows), strict=True)))
                loss = binary_cross_entropy_with_logits(model.model(**tokens).logits[:, 0], targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = section.lr * warmup_then_linear(step, steps, section.warmup)
            optimizer.step()
            optimizer.zero_grad()
            in_epoch = (step + 1) % sampler.steps_per_epoch
            if in_epoch % self.recipe.evaluation.eval_steps == 0 or step + 1 == steps:
                scorer = VectorModel.of(model) if isinstance(model, Encoder) else PairScores(model)
                if (score := sts_score(scorer, self.dev)) > best:
                    best, best_weights = score, {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(best_weights)
        model.eval()
        return best


def test_one_group_equals_the_papers_loop(one_group: Finished) -> None:
    """Without dropout, because `PlainLoop` pads each batch to its longest text, and a phase splits batches by length."""
    labels, devs = PlainLoop(one_group.result.recipe, one_group.path).run()
    assert len(labels) == 5
    for number, theirs in enumerate(labels):
        ours = one_group.store.labels(Phase(number))
        np.testing.assert_allclose(ours, theirs, atol=2e-4, err_msg=Phase(number).name)
    dev = [one_group.store.posted(Phase(number))["bert"]["dev"] for number in range(1, 5)]
    assert dev == pytest.approx(devs, abs=0.5)  # two close pairs of the 30 may swap ranks


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_batches_split_by_length_equal_one_padded_batch(
    tiny: Callable[..., Path], sentences: list[str], kind: str, tmp_path: Path
) -> None:
    longer = [f"{a} {b}" for a, b in zip(sentences[:12], sentences[5:17], strict=True)]
    first, second = [*longer, *("a cat" for _ in range(12))], sentences[100:124]
    pairs = make_pairs(tmp_path, first, second)
    rows, cpu = np.arange(24)[::-1].copy(), torch.device("cpu")
    bi = Encoder.load(tiny(kind), pooling="mean", max_length=32)
    cross = CrossEncoder.fresh(tiny(kind), 48).eval()
    batch = bi_tokens(bi, pairs).batch(rows, 0, cpu)
    assert len(batch.parts) > 1
    token_counts = [len(part.token_index) for part in batch.parts if part.token_index is not None]
    assert len(token_counts) == len(batch.parts)
    assert sum(token_counts) < sum(part.mask.numel() for part in batch.parts)
    ours, theirs = BiPairs(bi.eval())([batch])
    np.testing.assert_allclose(ours.detach(), bi.encode([first[row] for row in rows]), atol=1e-5)
    np.testing.assert_allclose(theirs.detach(), bi.encode([second[row] for row in rows]), atol=1e-5)
    tokens = cross_tokens(cross, pairs, both_orders=True)
    assert tokens.number == 48
    logits = CrossPairs(cross)([tokens.batch(rows + 24, 0, cpu)])
    swapped = cross.score([(second[row], first[row]) for row in rows])
    np.testing.assert_allclose(logits.sigmoid().detach(), swapped, atol=1e-5)


# -- groups ---------------------------------------------------------------------------------------------------------------


def test_two_groups_exchange_scores_and_keep_the_best(two_groups: Finished) -> None:
    store = two_groups.store
    for number in range(5):
        one, other = (store.scores(name, Phase(number)) for name in ("bert", "roberta"))
        np.testing.assert_allclose(store.labels(Phase(number)), 0.25 * one + 0.75 * other, atol=1e-6)
    assert {(best.group, best.kind) for best in two_groups.result.best} == {
        (group, kind) for group in ("bert", "roberta") for kind in ("bi", "cross")
    }
    for best in two_groups.result.best:
        numbers = (2, 4) if best.kind == "bi" else (1, 3)
        assert best.dev == max(store.posted(Phase(number))[best.group]["dev"] for number in numbers)
    bert = Encoder.load(two_groups.path / "models" / "bert" / "bi")
    assert (bert.pooling, bert.max_length) == ("mean", 16)
    emitted = [event.event for event in two_groups.events if isinstance(event, GroupEvent) and event.group == "roberta"]
    assert {StepReport, DevScore} <= {type(event) for event in emitted}
    assert [event.activity for event in emitted if isinstance(event, GroupActivity)][-1] == "finished"


def test_a_group_trains_with_its_own_settings(two_groups: Finished) -> None:
    steps = {name: entry["steps"] for name, entry in two_groups.store.posted(Phase(2)).items()}
    pairs = len(Pairs.open(open_store(two_groups.path / "pairs")))
    assert steps == {"bert": pairs // 16, "roberta": pairs // 8}
    RunDirectory.reopen(two_groups.path, ["groups.1.bi.engine=auto"])
    with fails_with(FrozenKeyError, "groups.1.bi.lr"):
        RunDirectory.reopen(two_groups.path, ["groups.1.bi.lr=1e-3"])


def test_an_exported_cross_encoder_scores_as_in_sentence_transformers(two_groups: Finished) -> None:
    from sentence_transformers import CrossEncoder as Theirs

    pairs = list(Pairs.open(open_store(two_groups.path / "pairs")).both())[:20]
    for group, max_length in (("bert", 32), ("roberta", 24)):
        model = two_groups.result.models[f"{group} cross"]
        ours, theirs = CrossEncoder.load(model), Theirs(str(model), device="cpu")
        assert ours.max_length == max_length
        np.testing.assert_allclose(ours.score(pairs), theirs.predict(pairs), atol=1e-5)


def test_a_failed_group_is_dropped_unless_it_is_the_last(
    both: MakeRecipe, tmp_path: Path, sentences: list[str]
) -> None:
    broken = make_encoder(tmp_path / "broken", "bert", sentences)
    file = broken / "model.safetensors"
    save_file({name: weight * 1e30 for name, weight in load_file(file).items()}, file, {"format": "pt"})
    shutil.copytree(both().groups[1].backbone, tmp_path / "moved")
    drop = (f"groups.1.cross_backbone={broken}", "mutual.on_failure=drop", "mutual.cycles=1")
    with fails_with(DivergedError, "not finite"):
        run_mutual(both(*drop, f"groups.0.cross_backbone={broken}"), Reporter())
    result = run_mutual(both(*drop, f"groups.1.backbone={tmp_path / 'moved'}"), Reporter())
    shutil.rmtree(tmp_path / "moved")  # a resumed run does not need the models of a dropped group
    assert resume_mutual(result.directory.path).best == result.best
    assert list(result.dropped) == ["roberta"] and {best.group for best in result.best} == {"bert"}
    store = PhaseStore(open_store(result.directory.path))
    np.testing.assert_array_equal(store.labels(Phase(1)), store.scores("bert", Phase(1)))
    np.testing.assert_allclose(  # phase 0 includes the dropped group
        store.labels(Phase(0)), (store.scores("bert", Phase(0)) + store.scores("roberta", Phase(0))) / 2, atol=1e-6
    )


def test_a_model_that_cannot_be_loaded_ends_the_run_before_it_has_a_folder(
    both: MakeRecipe, tmp_path: Path, sentences: list[str]
) -> None:
    broken = make_encoder(tmp_path / "broken", "bert", sentences)
    (broken / "model.safetensors").write_bytes(b"truncated")
    runs = tmp_path / "runs"
    recipe = both(f"groups.1.cross_backbone={broken}", "mutual.on_failure=drop", f"storage.runs={runs}")
    with fails_with(ModelFormatError, str(broken)):
        run_mutual(recipe, Reporter())
    assert not runs.exists() or not list(runs.iterdir())


def test_a_groups_own_precision_is_decided_by_its_own_devices(both: MakeRecipe) -> None:
    fast = DeviceSpeed("H100", "gpu", frozenset({"fp16", "bf16"}), {})
    slow = DeviceSpeed("old CPU", "cpu", frozenset(), {"bf16": 0.5})
    recipe = both("bi.precision=auto", "cross.precision=auto", "groups.1.bi.precision=auto")
    decided = decide_precisions(recipe, roles_on(recipe, {"bert": [slow], "roberta": [fast]}, [slow]), ignore)
    bert, roberta = decided.groups
    assert [decided.bi_of(group).precision for group in (bert, roberta)] == ["fp32", "bf16"]
    assert {decided.cross_of(group).precision for group in (bert, roberta)} == {"fp32"}
    dropped = {role.key for role in roles_on(recipe, {"bert": [slow]}, [slow])}
    assert "groups.1.bi.precision" not in dropped


@pytest.mark.slow
def test_phases_start_from_the_language_model_or_from_the_previous_phases_model(
    alone: MakeRecipe, tmp_path: Path, sentences: list[str]
) -> None:
    """A sequential run's first cross-encoder starts from the bi-encoder that labels, and its bi-encoder keeps head and norm."""
    language_model = make_encoder(tmp_path / "language-model", "bert", sentences, seed=5)
    start = Encoder.from_section(alone().groups[0])
    start.head.append(Dense(DenseShape(in_features=32, out_features=8)))
    start.normalize = True
    start.save(tmp_path / "start")
    models = (f"groups.0.backbone={tmp_path / 'start'}", f"groups.0.cross_backbone={language_model}")
    common = ("groups.0.pooling=null", *models, "mutual.cycles=1", "bi.lr=1e-12")
    starts = {"refresh": Encoder.load(language_model, pooling="mean"), "sequential": start}
    for initialization, expected in starts.items():
        result = run_mutual(alone(*common, "cross.lr=1e-12", f"mutual.initialization={initialization}"), Reporter())
        cross = CrossEncoder.load(result.models["bert cross"]).model.base_model.state_dict()
        for name, tensor in expected.backbone.state_dict().items():
            torch.testing.assert_close(cross[name], tensor, atol=1e-6, rtol=0)
        trained = Encoder.load(result.models["bert bi"])
        assert (len(trained.head), trained.normalize) == (1, True)
        for name, tensor in trained.state_dict().items():
            torch.testing.assert_close(start.state_dict()[name], tensor, atol=1e-6, rtol=0)
        (card,) = (card for card in result.cards if card.title.endswith("cross-encoder"))
        named = {"refresh": "language-model", "sequential": "start"}[initialization]
        assert f"initialized from `{named}`" in card.sections[0]
    result = run_mutual(alone(*common, "mutual.initialization=sequential"), Reporter())
    cross = CrossEncoder.load(result.models["bert cross"]).model.base_model.state_dict()
    bi = Encoder.load(result.models["bert bi"]).backbone.state_dict()
    name = next(name for name in bi if name.endswith("word_embeddings.weight"))
    torch.testing.assert_close(bi[name], cross[name], atol=1e-5, rtol=0)
    assert not torch.equal(bi[name], start.backbone.state_dict()[name])


def test_a_phases_initial_weights_are_mixed_into_its_scored_and_saved_bi_encoder(alone: MakeRecipe) -> None:
    """Its training and the cross-encoders' are as without; the dev score is the saved model's, and the labels are its cosines.

    Without any dev set, reports have the agreement with a start.
    """
    one_score = ("mutual.cycles=1", "evaluation.eval_steps=1000", "bi.epochs=1")
    plain = finish(alone(*one_score, "evaluation.final_suites=null", "evaluation.dev=none"))
    assert plain.result.evaluation is not None and not plain.result.evaluation.warnings
    assert {score.suite for score in plain.result.evaluation.scores} == {"texts"}
    assert {*plain.result.evaluation.scores[0].values} == {"bert bi"}
    assert not start_notes(plain.events)
    mixed = run_mutual(alone(*one_score, "groups.0.init_weight_mix=0.25"), Reporter())
    start = Encoder.from_section(mixed.recipe.groups[0]).state_dict()
    trained, saved = (Encoder.load(each.models["bert bi"], pooling="mean") for each in (plain.result, mixed))
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(parameter.data, 0.75 * trained.state_dict()[name] + 0.25 * start[name])
    dev = read_dev(mixed.recipe)
    (best,) = (best for best in mixed.best if best.kind == "bi")
    assert dev is not None and best.dev == pytest.approx(dev.score(VectorModel.of(saved)), abs=1e-4)
    _, from_cross, from_bi = labels_of(mixed.directory.path)
    np.testing.assert_array_equal(labels_of(plain.path)[1], from_cross)
    pairs = [*Pairs.open(open_store(mixed.directory.path / "pairs")).both()]
    np.testing.assert_allclose(VectorModel.of(saved).similarities(*zip(*pairs, strict=True)), from_bi, atol=1e-5)


# -- starts ---------------------------------------------------------------------------------------------------------------


def start_notes(events: list[Event]) -> list[dict[str, float]]:
    """Return the dev scores of the groups' starts, and of their first labels, that a run has reported."""
    stages = [event for event in events if isinstance(event, StageProgress) and event.name == "starts"]
    notes = [stage.note for stage in stages if stage.finished]
    return [{name: float(score) for name, score in re.findall(r"(\w+) (-?[\d.]+)", note)} for note in notes]


@pytest.fixture
def weak(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MutualRecipe:
    """A recipe of two groups whose dev scores are the first one's cosines: the other knows nothing of them."""
    models = {"good": tiny("bert"), "weak": tiny("minilm")}
    recipe, recorded = make_mutual_recipe(tmp_path, models, sentences, "mutual.cycles=1"), RecordedScores()
    dev = read_dev(recipe)
    assert dev is not None
    dev.score(recorded.recording(VectorModel.of(Encoder.from_section(recipe.groups[0]))))
    rows = [f"{score:.6f}\t{one}\t{other}" for (one, other), score in recorded.known.items()]
    Path(recipe.evaluation.dev).write_text("\n".join(["score\tsentence1\tsentence2", *rows]))
    return recipe


def test_a_group_that_makes_the_first_labels_worse_is_named(weak: MutualRecipe, one_group: Finished) -> None:
    events: list[Event] = []
    _, (warning,) = score_starts(weak, weak.groups, LocalBackend(), Reporter(events.append))
    (scores,) = start_notes(events)
    assert scores["good"] == pytest.approx(100, abs=0.1) and scores["weak"] < scores["labels"] < scores["good"]
    assert warning.code == "DCSE-W08" and "group weak" in warning.problem and "groups.1.weight" in warning.fix
    assert f"{scores['labels']:.2f} with it and {scores['good']:.2f} without" in warning.problem
    assert [[*scores] for scores in start_notes(one_group.events)] == [["bert"]]


# -- recipes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("pairs.task=sts", "pairs … path … task"),
        ("groups.1.name=bert", "groups … bert"),
        ("groups.1.workers=3", "roberta … 3 … bi.batch_size … 16"),
        ("groups.1.bi.batch_size=6 groups.1.workers=4", "roberta … groups.1.bi.batch_size 6 … groups.1.workers"),
        ("groups.0.max_workers=3", "max_workers 3, which does not divide bi.batch_size 16"),
        ("groups.0.max_workers=2 groups.0.workers=4", "max_workers 2, which is no multiple of its workers 4"),
        (
            "groups.0.max_workers=2 groups.0.bi.cuda_graphs=on",
            "groups.0.bi.cuda_graphs records steps with one dropout stream on each worker; write groups.0.max_workers: null",
        ),
        ("groups.1.cross.zero_stage=2", "groups.1.cross … DeepSpeed"),
        ("groups.0.bi.lr=-1", "groups.0.bi.lr … -1"),
        (
            "groups.1.workers=2 groups.1.gpus_per_worker=0.5 groups.1.bi.batch_size=8 groups.1.bi.engine=auto",
            "roberta … write groups.1.bi.engine: torch, or",
        ),
        (
            "groups.0.init_weight_mix=0.5 groups.0.bi.engine=deepspeed groups.0.bi.zero_stage=3",
            "groups.0.init_weight_mix … ZeRO 3 … bi.zero_stage: 2",
        ),
        ("groups.0.init_weight_mix=0.5 mutual.initialization=sequential", "groups.0.init_weight_mix … write refresh"),
        ("mutual.shared_workers=auto groups.0.cpus_per_worker=2", "differ in cpus_per_worker"),
        ("mutual.shared_workers=auto groups.0.node_labels={role: a}", "differ in node_labels"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(both: MakeRecipe, overrides: str, named: str) -> None:
    with fails_with(InvalidValueError, *named.split(" … ")):
        both(*re.split(r" (?=groups|mutual)", overrides))


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("trans-encoder-bert-base", 1),
        ("trans-encoder-mutual-base", 2),
        ("trans-encoder-mutual-base-large", 4),
    ],
)
def test_packaged_recipes_have_the_hyperparameters_of_table_16(name: str, groups: int) -> None:
    recipe = read_recipe(name, ["evaluation.data=x"])
    assert isinstance(recipe, MutualRecipe) and len(recipe.groups) == groups
    assert recipe.mutual.cycles == 3 and recipe.mutual.initialization == "refresh" and recipe.seed == 2021
    for group in recipe.groups:
        bi, cross = recipe.bi_of(group), recipe.cross_of(group)
        assert bi.batch_size == (64 if group.name.endswith("large") else 128)
        assert (bi.lr, bi.epochs, bi.warmup, bi.weight_decay) == (5e-5, 10, 0, 0.01)
        assert (cross.lr, cross.batch_size, cross.epochs, cross.warmup, cross.weight_decay) == (2e-5, 32, 1, 0.1, 0.01)
        assert cross.max_length == 64 and group.max_length == 32
        size = group.name.rpartition("-")[2] if groups == 4 else "base"
        assert size in group.backbone and size in (group.cross_backbone or group.backbone)


def test_ray_can_change_in_a_run_but_not_what_dropout_depends_on(alone: MakeRecipe) -> None:
    """One worker computes what several do; see `test_mutual_steps.py`."""
    run = RunDirectory.create(alone("groups.0.workers=2", "ray=true", "bi.batch_size=4", "cross.batch_size=4")).path
    recipe = RunDirectory.reopen(run, ["ray=false"])[1]
    assert isinstance(recipe, MutualRecipe) and recipe.groups[0].rng_streams == 2
    for key in ("workers", "max_workers"):
        with fails_with(FrozenKeyError, f"groups.0.{key}"):
            RunDirectory.reopen(run, [f"groups.0.{key}=4"])


def test_a_resumed_run_checks_its_records(one_group: Finished, tmp_path: Path) -> None:
    shutil.copytree(one_group.path, run := tmp_path / "run", symlinks=True)
    again = resume_mutual(run, "bi.log_every=1")
    assert [best.dev for best in again.best] == [best.dev for best in one_group.result.best]
    state = load_checked_json(run / "phases.json")
    state["posted"].pop("4")
    (run / "phases.json").write_text(dump_checked_json(state))
    (damaged,) = run.glob("labels/cycle-2-cross.*.npy")
    np.save(damaged, np.load(damaged) + 1)
    shutil.rmtree(run / "groups" / "bert" / "cycle-2-bi")
    with fails_with(RunRecordError, damaged.name, "checksum"):
        resume_mutual(run)


# -- pairs, dev scores and reports ----------------------------------------------------------------------------------------


def test_missing_columns_are_refused(both: MakeRecipe, tmp_path: Path) -> None:
    both()
    with fails_with(EvaluationFormatError, "pairs.tsv", "sentence3"):
        run_mutual(both("pairs.columns=[sentence1, sentence3]"), Reporter())
    (tmp_path / "nothing.tsv").write_text("sentence1\tsentence2\na\tb\n")
    with fails_with(EvaluationFormatError, "nothing.tsv", "score", "label"):
        run_mutual(both(f"evaluation.dev={tmp_path / 'nothing.tsv'}"), Reporter())


def test_evaluations_follow_optimizer_updates_and_pairs_of_a_task_are_transductive(
    alone: MakeRecipe, labelled: Path
) -> None:
    data = (f"evaluation.data={labelled}", "evaluation.eval_steps=4", "mutual.cycles=1")
    accumulate = ("cross.gradient_accumulation=3", "cross.epochs=3", "bi.gradient_accumulation=2", "bi.epochs=3")
    trained = finish(alone(*data, *accumulate, "pairs={task: mrpc}"))
    scores = [event.event for event in trained.events if isinstance(event, GroupEvent)]
    found = [(event.step, event.total) for event in scores if isinstance(event, DevScore)]
    cross, bi = ([step for step, total in found if total == steps] for steps in (30, 14))
    # Epochs have 10 and 5 steps. A score is due every 4 steps and at each epoch's end, and follows the next optimizer update.
    assert cross == [6, 9, 12, 15, 18, 21, 24, 30] and bi == [4, 6, 10, 14]
    assert trained.result.evaluation is None
    write_cards(trained.result)
    card = (trained.result.best[0].model / "README.md").read_text()
    assert "80 unlabeled sentence pairs" in card and "**Transductive**: its pairs are those of the task `mrpc`" in card
    with fails_with(CorpusNotFoundError, "pairs.task", "mrcp", "mrpc, sts12, stsb"):
        run_mutual(alone(*data, "pairs={task: mrcp}"), Reporter())


def test_without_labelled_sets_reports_have_the_dev_scores_and_the_agreement_with_a_start(two_groups: Finished) -> None:
    result = two_groups.result
    assert result.evaluation is not None
    found = {(score.suite, score.measure): score for score in result.evaluation.scores}
    everywhere = {f"{group} {kind}" for group in ("bert", "roberta") for kind in ("start", "bi", "cross")}
    everywhere |= {f"{kind} ensemble" for kind in ("start", "bi", "cross")}
    assert set(found["dev", "all"].values) == everywhere
    for best in result.best:
        assert found["dev", "all"].values[f"{best.group} {best.kind}"] == pytest.approx(best.dev)
    assert set(found["texts", "kept@1"].values) == {"roberta start", "bert bi", "roberta bi"}
    history = read_run(two_groups.path)
    assert history.cycles is not None and history.cycles.number == 2
    assert set(history.cycles.dev) == {"bert bi", "bert cross", "roberta bi", "roberta cross"}
    assert list(history.cycles.agreement) == [Phase(number).name for number in range(5)]
    with warnings.catch_warnings(action="error"):  # charts with a legend of three rows have room for their axes
        page, text = html(result.evaluation, history), markdown(result.evaluation, history)
    for part in ("Dev score by cycle", "Agreement between the groups", "bert – roberta"):
        assert part in page and part in text
    for part in ("Dev score (Spearman", "sentences, with bert start", "checkpoints and cycles were chosen by"):
        assert part in text
    assert "Rows in italics" not in page and '<span class="mark">p' not in page and "Side by side" in page
    write_cards(result)
    for best in result.best:
        card = (best.model / "README.md").read_text()
        assert f"of cycle {best.phase.cycle}" in card and "Warning: checkpoints and cycles were chosen by" in card
        assert ("CrossEncoder" if best.kind == "cross" else "SentenceTransformer") in card
        assert "model-index" not in card
    with fails_with(ModelNotFoundError, str(two_groups.path), "models/bert/bi, models/bert/cross"):
        open_candidate("run", str(two_groups.path), LoadOptions())
