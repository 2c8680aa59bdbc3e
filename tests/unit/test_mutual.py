"""Mutual distillation: equality with the paper's loop, labels of several groups, runs that are stopped, damaged and resumed."""

from __future__ import annotations

import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import binary_cross_entropy_with_logits, cosine_similarity

from distcse.errors import (
    CorpusNotFoundError,
    DivergedError,
    EvaluationFormatError,
    FrozenKeyError,
    InvalidValueError,
    ModelFormatError,
    ModelNotFoundError,
    RecipeError,
    RunRecordError,
    RunTakenOverError,
    UnknownKeyError,
    WorkFailedError,
)
from distcse.evaluation import LoadOptions, PairScores, VectorModel, open_candidate, read_table, sts_score
from distcse.evaluation.tasks.sts import ScoredPairs
from distcse.events import DevScore, Event, GroupActivity, GroupEvent, Reporter, StepReport
from distcse.models import CrossEncoder, Encoder
from distcse.models.pooling import Dense
from distcse.models.st_format import DenseShape
from distcse.recipe import MutualRecipe, read_recipe
from distcse.report.card import write_cards
from distcse.report.history import read_run
from distcse.report.page import html, markdown
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.runs.mutual.dev_pairs import DevPairs
from distcse.runs.mutual.group import SerializedGroup
from distcse.runs.mutual.label_exchange import LabelExchange, combine
from distcse.runs.mutual.pair_task import BiPairs, CrossPairs
from distcse.runs.mutual.pairs import read_pairs
from distcse.runs.mutual.phase_store import PhaseStore
from distcse.runs.mutual.phases import GroupContext, Phase
from distcse.runs.mutual.result import MutualResult
from distcse.storage import dump_checked_json, load_checked_json, open_store
from distcse.text import BatchSampler, Pairs
from distcse.training.dropout_rng import dropout_seed
from distcse.training.schedule import warmup_then_linear
from tests.backends import run, run_mutual
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import make_encoder
from tests.pairs import bi_tokens, cross_tokens, make_mutual_recipe, make_pairs

MakeRecipe = Callable[..., MutualRecipe]


@pytest.fixture
def alone(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    return lambda *overrides: make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *overrides)


@pytest.fixture
def both(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    models = {"bert": tiny("bert"), "roberta": tiny("roberta")}
    return lambda *overrides: make_mutual_recipe(tmp_path, models, sentences, *overrides)


def labels_of(result: MutualResult) -> list[np.ndarray]:
    store = PhaseStore(result.directory.path)
    found = [store.labels(Phase(number)) for number in range(2 * result.recipe.mutual.cycles + 1)]
    return [labels for labels in found if labels is not None]


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
        best, best_weights = -1e9, {}
        for step in range(steps):
            model.train()
            rows = sampler.batch(step)
            targets = torch.from_numpy(labels[rows])
            torch.manual_seed(dropout_seed(seed, step, 0))
            if isinstance(model, Encoder):
                texts = [pairs[row][0] for row in rows] + [pairs[row][1] for row in rows]
                tokens = model.tokenizer(
                    texts, padding=True, truncation=True, max_length=model.max_length, return_tensors="pt"
                )
                first, second = model(tokens["input_ids"], tokens["attention_mask"]).chunk(2)
                loss = (cosine_similarity(first, second) - targets).square().mean()
            else:
                texts = [list(side) for side in zip(*(pairs[row] for row in rows), strict=True)]
                tokens = model.tokenizer(
                    *texts, padding=True, truncation=True, max_length=model.max_length, return_tensors="pt"
                )
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


def test_one_group_equals_the_papers_loop(alone: MakeRecipe) -> None:
    """Without dropout, because `PlainLoop` pads each batch to its longest text, and a phase splits batches by length."""
    result = run_mutual(alone("groups.0.dropout=0.0"), Reporter())
    labels, devs = PlainLoop(result.recipe, result.directory.path).run()
    found = labels_of(result)
    assert len(found) == len(labels) == 5
    for number, (ours, theirs) in enumerate(zip(found, labels, strict=True)):
        np.testing.assert_allclose(ours, theirs, atol=2e-4, err_msg=Phase(number).name)
    store = PhaseStore(result.directory.path)
    dev = [store.posted(Phase(number))["bert"]["dev"] for number in range(1, 5)]
    assert dev == pytest.approx(devs, abs=0.5)  # two close pairs of the 30 may swap ranks


def test_labels_of_several_groups() -> None:
    table = [
        np.array([0.1, 0.9, -0.2]),
        np.array([0.5, 0.7, 0.1]),
        np.array([0.6, 0.2, 0.4]),
        np.array([0.2, 0.8, 0.0]),
    ]
    assert combine(table[:2], [1, 1], False) == pytest.approx([0.3, 0.8, -0.05])
    assert combine(table[:2], [3, 1], False) == pytest.approx([0.2, 0.85, -0.125])


def test_standardized_scores_of_a_narrow_band_count_as_much_as_others() -> None:
    rng = np.random.default_rng(3)
    wide = rng.normal(0.4, 0.2, 1000).astype(np.float32)
    narrow = (0.8 + 0.01 * rng.normal(size=1000)).astype(np.float32)
    standard = [
        (scores - scores.mean()) / scores.std() for scores in (wide.astype(np.float64), narrow.astype(np.float64))
    ]
    for weights in ([1, 1], [3, 1]):
        mean, deviation = np.average([[0.4, 0.2], [0.8, 0.01]], axis=0, weights=weights)
        labels = combine([wide, narrow], weights, True)
        expected = np.average(standard, axis=0, weights=weights)
        np.testing.assert_allclose(labels, expected * deviation + mean, atol=0.02)
        assert np.corrcoef(labels, expected)[0, 1] > 0.999999
    assert combine([wide, wide], [1, 1], True) == pytest.approx(wide, abs=1e-6)
    constant = np.full(3, 0.5, np.float32)
    assert combine([constant], [1], True) == pytest.approx(constant)


def test_two_groups_exchange_scores_and_keep_the_best(both: MakeRecipe) -> None:
    events: list[Event] = []
    result = run_mutual(both("groups.1.weight=3"), Reporter(events.append))
    store = PhaseStore(result.directory.path)
    for number in range(5):
        one, other = (store.scores(name, Phase(number)) for name in ("bert", "roberta"))
        np.testing.assert_allclose(store.labels(Phase(number)), 0.25 * one + 0.75 * other, atol=1e-6)
    assert {(best.group, best.kind) for best in result.best} == {
        (group, kind) for group in ("bert", "roberta") for kind in ("bi", "cross")
    }
    for best in result.best:
        numbers = (2, 4) if best.kind == "bi" else (1, 3)
        assert best.dev == max(store.posted(Phase(number))[best.group]["dev"] for number in numbers)
    bert = Encoder.load(result.directory.path / "models" / "bert" / "bi")
    assert (bert.pooling, bert.max_length) == ("mean", 16)
    emitted = [event.event for event in events if isinstance(event, GroupEvent) and event.group == "roberta"]
    assert {StepReport, DevScore} <= {type(event) for event in emitted}
    assert [event.activity for event in emitted if isinstance(event, GroupActivity)][-1] == "finished"


def test_an_exported_cross_encoder_scores_as_in_sentence_transformers(both: MakeRecipe) -> None:
    from sentence_transformers import CrossEncoder as Theirs

    result = run_mutual(both("mutual.cycles=1"), Reporter())
    pairs = list(Pairs.open(result.directory.path / "pairs").both())[:20]
    for best in result.best:
        if best.kind == "cross":
            ours, theirs = CrossEncoder.load(best.model), Theirs(str(best.model), device="cpu")
            assert ours.max_length == 32
            np.testing.assert_allclose(ours.score(pairs), theirs.predict(pairs), atol=1e-5)


@pytest.mark.slow
def test_models_of_a_group_can_teach_a_student(
    alone: MakeRecipe, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    models = {best.kind: best.model for best in run_mutual(alone("mutual.cycles=1"), Reporter()).best}
    teachers = [models["bi"], models["cross"]]
    overrides = ("training.max_steps=8", "training.batch_size=8", "training.log_every=1")
    events: list[Event] = []
    result = run(make_recipe(tmp_path, tiny("bert"), teachers, sentences, *overrides), Reporter(events.append))
    assert result.train_result.state.finished
    assert all(event.losses["rank"] > 0 for event in events if isinstance(event, StepReport))
    assert result.evaluation is not None
    assert [model.kind for model in result.evaluation.models[-2:]] == ["bi-encoder", "cross-encoder"]


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_labels(both: MakeRecipe) -> None:
    uninterrupted = labels_of(run_mutual(both(), Reporter()))
    for stop_at in (2, 5, 9, 20):
        steps: list[Event] = []

        def note(event: Event, steps: list[Event] = steps) -> None:
            if isinstance(event, GroupEvent) and isinstance(event.event, StepReport):
                steps.append(event)

        first = run_mutual(both(), Reporter(note, lambda steps=steps, stop_at=stop_at: len(steps) >= stop_at))
        assert first.interrupted and first.evaluation is None and not first.best
        directory, recipe = RunDirectory.reopen(first.directory.path, [])
        assert isinstance(recipe, MutualRecipe)
        second = run_mutual(recipe, Reporter(), directory)
        assert not second.interrupted
        for ours, theirs in zip(labels_of(second), uninterrupted, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_resumed_run_combines_labels_that_a_killed_driver_did_not(both: MakeRecipe) -> None:
    result = run_mutual(both("mutual.cycles=1"), Reporter())
    run = result.directory.path
    expected = labels_of(result)
    state = load_checked_json(run / "phases.json")
    for number in ("1", "2"):
        del state["labels"][number]
    del state["posted"]["2"]
    (run / "phases.json").write_text(dump_checked_json(state))
    for group in ("bert", "roberta"):
        shutil.rmtree(run / "groups" / group / "cycle-1-bi")
    directory, recipe = RunDirectory.reopen(run, [])
    assert isinstance(recipe, MutualRecipe)
    for ours, theirs in zip(labels_of(run_mutual(recipe, Reporter(), directory)), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_evaluations_follow_optimizer_updates(alone: MakeRecipe) -> None:
    found: list[tuple[int, int]] = []

    def note(event: Event) -> None:
        if isinstance(event, GroupEvent) and isinstance(event.event, DevScore):
            found.append((event.event.step, event.event.total))

    overrides = ("cross.gradient_accumulation=3", "cross.epochs=3", "bi.gradient_accumulation=2", "bi.epochs=3")
    run_mutual(alone(*overrides, "mutual.cycles=1"), Reporter(note))
    cross, bi = ([step for step, total in found if total == steps] for steps in (21, 8))
    # Epochs have 7 and 3 steps. A score is due every 2 steps and at each epoch's end, and follows the next optimizer update.
    assert cross == [3, 6, 9, 12, 15, 18, 21] and bi == [2, 4, 6, 8]


def test_an_ending_run_drops_no_group_and_one_taken_over_writes_nothing(both: MakeRecipe, tmp_path: Path) -> None:
    store = PhaseStore(tmp_path, Lease.acquire(tmp_path))
    exchange = LabelExchange(both(), store, threading.Event())
    exchange.end()
    assert not exchange.drop("bert", "its actors were closed") and not store.dropped
    Lease.acquire(tmp_path)
    with fails_with(RunTakenOverError, str(tmp_path)):
        store.drop("bert", "too late")
    assert not PhaseStore(tmp_path).dropped


def test_an_unexpected_error_names_its_group_and_phase() -> None:
    class Full:
        name = "bert"

        def prepare(self, phase: Phase) -> None:
            raise OSError(28, "No space left on device")

    group: Any = Full()
    with fails_with(WorkFailedError, "bert", "cycle-1-cross", "OSError", "No space left on device"):
        SerializedGroup(group, threading.Lock()).prepare(Phase(1))


@pytest.mark.slow
def test_sequential_phases_start_from_the_previous_phases_model(alone: MakeRecipe, tmp_path: Path) -> None:
    overrides = ("mutual.initialization=sequential", "mutual.cycles=1", "bi.lr=1e-9", "cross.lr=1e-9")
    start = Encoder.from_section(alone().groups[0])
    start.head.append(Dense(DenseShape(in_features=32, out_features=8)))
    start.normalize = True
    start.save(tmp_path / "with-pooling")
    defined_by_model = (f"groups.0.backbone={tmp_path / 'with-pooling'}", "groups.0.pooling=null")
    for settings in (overrides, overrides[1:], (*overrides, *defined_by_model)):
        result = run_mutual(alone(*settings), Reporter())
        trained = Encoder.load(result.directory.path / "models" / "bert" / "bi")
        assert (len(trained.head), trained.normalize) == ((1, True) if defined_by_model[0] in settings else (0, False))
        for name, tensor in trained.state_dict().items():
            torch.testing.assert_close(start.state_dict()[name], tensor, atol=1e-5, rtol=0)
    result = run_mutual(alone("mutual.initialization=sequential", "mutual.cycles=1", "bi.lr=1e-9"), Reporter())
    cross = CrossEncoder.load(result.directory.path / "models" / "bert" / "cross").model.base_model.state_dict()
    bi = Encoder.load(result.directory.path / "models" / "bert" / "bi").backbone.state_dict()
    name = next(name for name in bi if name.endswith("word_embeddings.weight"))
    torch.testing.assert_close(bi[name], cross[name], atol=1e-5, rtol=0)
    assert not torch.equal(bi[name], start.backbone.state_dict()[name])


def test_a_phases_initial_weights_are_mixed_into_its_scored_and_saved_bi_encoder(alone: MakeRecipe) -> None:
    """Its training and the cross-encoders' are as without; the dev score is the saved model's, and the labels are its cosines."""
    one_score = ("mutual.cycles=1", "evaluation.eval_steps=1000", "bi.epochs=1")
    plain = run_mutual(alone(*one_score), Reporter())
    mixed = run_mutual(alone(*one_score, "groups.0.init_weight_mix=0.25"), Reporter())
    start = Encoder.from_section(mixed.recipe.groups[0]).state_dict()
    trained, saved = (
        Encoder.load(result.directory.path / "models" / "bert" / "bi", pooling="mean") for result in (plain, mixed)
    )
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(parameter.data, 0.75 * trained.state_dict()[name] + 0.25 * start[name])
    dev = DevPairs.of(mixed.recipe)
    (best,) = (best for best in mixed.best if best.kind == "bi")
    assert dev is not None and best.dev == pytest.approx(dev.score(VectorModel.of(saved)), abs=1e-4)
    _, from_cross, from_bi = labels_of(mixed)
    np.testing.assert_array_equal(labels_of(plain)[1], from_cross)
    pairs = [*Pairs.open(mixed.directory.path / "pairs").both()]
    np.testing.assert_allclose(VectorModel.of(saved).similarities(*zip(*pairs, strict=True)), from_bi, atol=1e-5)


@pytest.mark.slow
def test_a_sequential_runs_first_cross_encoder_starts_from_the_labelling_bi_encoder(
    alone: MakeRecipe, tmp_path: Path, sentences: list[str]
) -> None:
    language_model = make_encoder(tmp_path / "language-model", "bert", sentences, seed=5)
    overrides = (f"groups.0.cross_backbone={language_model}", "mutual.cycles=1", "cross.lr=1e-12", "bi.lr=1e-12")
    starts = {"refresh": language_model, "sequential": Path(alone().groups[0].backbone)}
    assert starts["refresh"] != starts["sequential"]
    for initialization, start in starts.items():
        recipe = alone(*overrides, f"mutual.initialization={initialization}")
        result = run_mutual(recipe, Reporter())
        assert recipe.cross_start(recipe.groups[0]) == str(start)
        trained = CrossEncoder.load(result.directory.path / "models" / "bert" / "cross").model.base_model.state_dict()
        for name, tensor in Encoder.load(start, pooling="mean").backbone.state_dict().items():
            torch.testing.assert_close(trained[name], tensor, atol=1e-6, rtol=0)
        (card,) = (card for card in result.cards if card.title.endswith("cross-encoder"))
        assert f"initialized from `{start.name}`" in card.sections[0]


def test_a_model_that_cannot_be_loaded_ends_the_run_before_it_has_a_folder(
    both: MakeRecipe, tmp_path: Path, sentences: list[str]
) -> None:
    broken = make_encoder(tmp_path / "broken", "bert", sentences)
    (broken / "model.safetensors").write_bytes(b"truncated")
    recipe = both(f"groups.1.cross_backbone={broken}", "mutual.on_failure=drop")
    with fails_with(ModelFormatError, str(broken)):
        run_mutual(recipe, Reporter())
    assert not Path(recipe.storage.runs).exists() or not list(Path(recipe.storage.runs).iterdir())


def test_a_failed_group_is_dropped_or_ends_the_run(both: MakeRecipe, tmp_path: Path, sentences: list[str]) -> None:
    broken = make_encoder(tmp_path / "broken", "bert", sentences)
    file = broken / "model.safetensors"
    save_file({name: weight * 1e30 for name, weight in load_file(file).items()}, file, {"format": "pt"})
    override = f"groups.1.cross_backbone={broken}"
    with fails_with(DivergedError, "not finite"):
        run_mutual(both(override), Reporter())
    with fails_with(DivergedError, "not finite"):  # the last group is not dropped
        run_mutual(both(override, f"groups.0.cross_backbone={broken}", "mutual.on_failure=drop"), Reporter())
    shutil.copytree(both().groups[1].backbone, tmp_path / "moved")
    drop = (override, "mutual.on_failure=drop", f"groups.1.backbone={tmp_path / 'moved'}")
    result = run_mutual(both(*drop), Reporter())
    shutil.rmtree(tmp_path / "moved")  # a resumed run does not need the models of a dropped group
    directory, recipe = RunDirectory.reopen(result.directory.path, [])
    assert isinstance(recipe, MutualRecipe)
    assert run_mutual(recipe, Reporter(), directory).best == result.best
    assert list(result.dropped) == ["roberta"] and {best.group for best in result.best} == {"bert"}
    store = PhaseStore(result.directory.path)
    np.testing.assert_array_equal(store.labels(Phase(1)), store.scores("bert", Phase(1)))
    np.testing.assert_allclose(  # phase 0 includes the dropped group
        store.labels(Phase(0)), (store.scores("bert", Phase(0)) + store.scores("roberta", Phase(0))) / 2, atol=1e-6
    )


@pytest.mark.slow
def test_cycles_end_without_improvement(alone: MakeRecipe) -> None:
    result = run_mutual(alone("mutual.cycles=6", "mutual.patience=1", "bi.lr=1e-9", "cross.lr=1e-9"), Reporter())
    store = PhaseStore(result.directory.path)
    assert store.stopped_after is not None and store.stopped_after.cycle < 6
    assert store.labels(Phase(store.stopped_after.number + 1)) is None


def test_ray_can_change_in_a_run_but_not_what_dropout_depends_on(alone: MakeRecipe) -> None:
    """One worker computes what several do; see `test_mutual_streams.py`."""
    recipe = alone("groups.0.workers=2", "ray=true", "bi.batch_size=4", "cross.batch_size=4")
    run = RunDirectory.create(recipe).path
    _, resumed = RunDirectory.reopen(run, ["ray=false"])
    assert isinstance(resumed, MutualRecipe) and resumed.groups[0].rng_streams == 2
    for key in ("workers", "max_workers"):
        with fails_with(FrozenKeyError, f"groups.0.{key}"):
            RunDirectory.reopen(run, [f"groups.0.{key}=4"])


def test_a_resumed_run_checks_its_records(alone: MakeRecipe) -> None:
    result = run_mutual(alone("mutual.cycles=1"), Reporter())
    run = result.directory.path
    directory, recipe = RunDirectory.reopen(run, ["bi.log_every=1"])
    assert isinstance(recipe, MutualRecipe)
    again = run_mutual(recipe, Reporter(), directory)
    assert [best.dev for best in again.best] == [best.dev for best in result.best]
    with fails_with(FrozenKeyError, "bi.lr"):
        RunDirectory.reopen(run, ["bi.lr=2e-3"])
    state = load_checked_json(run / "phases.json")
    state["posted"].pop("2")
    (run / "phases.json").write_text(dump_checked_json(state))
    (damaged,) = run.glob("labels/cycle-1-cross.*.npy")
    np.save(damaged, np.load(damaged) + 1)
    shutil.rmtree(run / "groups" / "bert" / "cycle-1-bi")
    with fails_with(RunRecordError, damaged.name, "checksum"):
        run_mutual(recipe, Reporter(), directory)
    (run / "phases.json").write_text("{")
    with fails_with(RunRecordError, "phases.json"):
        run_mutual(recipe, Reporter(), directory)


@pytest.mark.parametrize(
    ("override", "error", "named"),
    [
        ("pairs.task=sts", InvalidValueError, ("pairs", "path", "task")),
        ("groups.1.name=bert", InvalidValueError, ("groups", "bert")),
        ("groups.1.workers=3", InvalidValueError, ("roberta", "3", "bi.batch_size", "16")),
        *(
            (f"mutual.{key}", UnknownKeyError, (f"mutual.{key.partition('=')[0]}",))
            for key in ("exchange=all", "clamp=true")
        ),
        ("groups.0.lr=1", UnknownKeyError, ("groups.0.lr",)),
        (
            "groups.0={name: one, backbone: x, init_weight_mix: 0.5, bi: {engine: deepspeed, zero_stage: 3}}",
            InvalidValueError,
            ("groups.0.init_weight_mix", "ZeRO 3", "bi.zero_stage: 2"),
        ),
        (
            "groups.0={name: one, backbone: x, init_weight_mix: 0.5} mutual.initialization=sequential",
            InvalidValueError,
            ("groups.0.init_weight_mix", "write refresh"),
        ),
    ],
)
def test_invalid_recipes_are_refused(
    both: MakeRecipe, override: str, error: type[RecipeError], named: tuple[str, ...]
) -> None:
    with fails_with(error, *named):
        both(*re.split(r" (?=mutual)", override))


def test_missing_columns_are_refused(both: MakeRecipe, tmp_path: Path) -> None:
    both()
    with fails_with(EvaluationFormatError, "pairs.tsv", "sentence3"):
        run_mutual(both("pairs.columns=[sentence1, sentence3]"), Reporter())
    (tmp_path / "nothing.tsv").write_text("sentence1\tsentence2\na\tb\n")
    with fails_with(EvaluationFormatError, "nothing.tsv", "score", "label"):
        run_mutual(both(f"evaluation.dev={tmp_path / 'nothing.tsv'}"), Reporter())


@pytest.mark.parametrize("name", ["trans-encoder-mutual-base", "trans-encoder-bert-base"])
def test_packaged_recipes_have_the_hyperparameters_of_table_16(name: str) -> None:
    recipe = read_recipe(name, ["evaluation.data=x"])
    assert isinstance(recipe, MutualRecipe)
    bi, cross = recipe.bi, recipe.cross
    assert (bi.lr, bi.batch_size, bi.epochs, bi.warmup, bi.weight_decay) == (5e-5, 128, 10, 0, 0.01)
    assert (cross.lr, cross.batch_size, cross.epochs, cross.warmup, cross.weight_decay) == (2e-5, 32, 1, 0.1, 0.01)
    assert recipe.mutual.cycles == 3 and recipe.mutual.initialization == "refresh" and recipe.seed == 2021
    assert cross.max_length == 64 and {group.max_length for group in recipe.groups} == {32}


@pytest.mark.slow
def test_pages_and_cards_show_cycles_groups_and_contaminated_sets(both: MakeRecipe, labelled: Path) -> None:
    overrides = (f"evaluation.data={labelled}", "evaluation.dev=stsb", "evaluation.final_suites=[sts, pairs]")
    pairs = (f"pairs={{path: '{labelled}/sts/stsb/test.tsv.gz'}}", "mutual.on_failure=drop")
    result = run_mutual(both(*overrides, *pairs), Reporter())
    assert result.evaluation is not None
    models = [info.name for info in result.evaluation.models]
    assert models == [
        *("bert start", "roberta start", "start ensemble"),
        *("bert bi", "roberta bi", "bi ensemble", "bert cross", "roberta cross", "cross ensemble"),
    ]
    timed = [info.name for info in result.evaluation.models if info.sentences_per_s is not None]
    assert timed == ["bert bi", "roberta bi", "bert cross", "roberta cross"]
    values = next(row for row in result.evaluation.scores if (row.set, row.measure) == ("STS-B", "all")).values
    assert set(values) == set(models)
    history = read_run(result.directory.path)
    assert history.cycles is not None and history.cycles.number == 2
    seconds = {name: duration for name, duration, _ in history.stages}
    assert (
        list(seconds)[:6] == ["starts", "pairs", "tokens", "steps", "groups", "contamination"]
        and seconds["groups"] > seconds["contamination"]
    )
    assert set(history.cycles.dev) == {"bert bi", "bert cross", "roberta bi", "roberta cross"}
    assert list(history.cycles.agreement) == [Phase(number).name for number in range(5)]
    with fails_with(ModelNotFoundError, str(result.directory.path), "models/bert/bi, models/bert/cross"):
        open_candidate("run", str(result.directory.path), LoadOptions())
    page, text = html(result.evaluation, history), markdown(result.evaluation, history)
    for part in ("Dev score by cycle", "Agreement between the groups", "bert – roberta", "‡"):
        assert part in page and part in text
    assert "Side by side" in page
    write_cards(result)
    for best in result.best:
        card = (best.model / "README.md").read_text()
        assert f"of cycle {best.phase.cycle}" in card and "‡" in card and "STS-B" in card
        assert ("CrossEncoder" if best.kind == "cross" else "SentenceTransformer") in card


def test_without_labelled_sets_reports_have_the_dev_scores_and_the_agreement_with_a_start(both: MakeRecipe) -> None:
    result = run_mutual(both("evaluation.final_suites=null", "mutual.cycles=1"), Reporter())
    assert result.evaluation is not None
    found = {(score.suite, score.measure): score for score in result.evaluation.scores}
    everywhere = {f"{group} {kind}" for group in ("bert", "roberta") for kind in ("start", "bi", "cross")}
    everywhere |= {f"{kind} ensemble" for kind in ("start", "bi", "cross")}
    assert set(found["dev", "all"].values) == everywhere
    for best in result.best:
        assert found["dev", "all"].values[f"{best.group} {best.kind}"] == pytest.approx(best.dev)
    assert set(found["texts", "kept@1"].values) == {"roberta start", "bert bi", "roberta bi"}
    history = read_run(result.directory.path)
    with warnings.catch_warnings(action="error"):  # charts with a legend of three rows have room for their axes
        page, text = html(result.evaluation, history), markdown(result.evaluation, history)
    for part in (
        "Dev score (Spearman",
        "of the pairs' sentences, with bert start",
        "checkpoints and cycles were chosen by",
    ):
        assert part in text
    assert "Rows in italics" not in page and '<span class="mark">p' not in page
    write_cards(result)
    card = (result.models["bert bi"] / "README.md").read_text()
    assert "model-index" not in card and "Warning: checkpoints and cycles were chosen by" in card


def test_without_any_dev_set_reports_have_the_agreement_with_a_start(alone: MakeRecipe) -> None:
    overrides = ("evaluation.final_suites=null", "evaluation.dev=none", "mutual.cycles=1")
    result = run_mutual(alone(*overrides), Reporter())
    assert result.evaluation is not None and not result.evaluation.warnings
    assert {score.suite for score in result.evaluation.scores} == {"texts"}
    assert {*result.evaluation.scores[0].values} == {"bert bi"}


def test_pairs_of_a_task_are_transductive_by_name(alone: MakeRecipe, labelled: Path) -> None:
    overrides = (f"evaluation.data={labelled}", "evaluation.dev=none", "evaluation.final_suites=[]", "mutual.cycles=1")
    result = run_mutual(alone(*overrides, "pairs={task: mrpc}"), Reporter())
    assert result.evaluation is None
    write_cards(result)
    card = (result.best[0].model / "README.md").read_text()
    assert "80 unlabelled sentence pairs" in card and "**Transductive**: its pairs are those of the task `mrpc`" in card
    with fails_with(CorpusNotFoundError, "pairs.task", "mrcp", "mrpc, sts12, stsb"):
        run_mutual(alone(*overrides, "pairs={task: mrcp}"), Reporter())


def test_pairs_of_an_sts_set_are_those_of_all_its_splits(alone: MakeRecipe, labelled: Path, tmp_path: Path) -> None:
    pairs = read_pairs(alone(f"evaluation.data={labelled}", "pairs={task: stsb}"), tmp_path / "stsb")
    tables = [read_table(labelled / "sts" / "stsb" / f"{split}.tsv.gz") for split in ("dev", "test")]
    expected = {
        pair for table in tables for pair in zip(table.texts("sentence1"), table.texts("sentence2"), strict=True)
    }
    assert set(pairs.both()) == expected and len(pairs) == len(expected)


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
    assert len(tokens) == 48
    logits = CrossPairs(cross)([tokens.batch(rows + 24, 0, cpu)])
    swapped = cross.score([(second[row], first[row]) for row in rows])
    np.testing.assert_allclose(logits.sigmoid().detach(), swapped, atol=1e-5)
