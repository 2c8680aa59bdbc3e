"""Rows 1 to 4, 6, 12 (training), 31 (share) and 34: the student's step against the public loops'.

    python -m benchmarks.step --data ../shared/data [--quick] [--rows 2 3]

A student of MiniLM's size and two teachers that cost 1 to 3.55, real sentences. The reference style's loss and gradient are
compared with ours on one batch, without dropout and with live lists, before anything is timed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.material import (
    MINILM,
    fast_precisions,
    forward_flops,
    list_recipe,
    live_sources,
    prepared,
    stand_in,
    table_sources,
)
from benchmarks.options import Options, script
from benchmarks.protocol import Effort, Figure, Report, counted, interleave, machine, of_ratio, of_spread, timed
from benchmarks.reference_style import ContrastiveLoop, FrozenTeacher, batches_of, encode, rankcse, simcse
from distcse.evaluation import VectorModel, labelled_dev, read_table
from distcse.losses import TeacherOutputs, gather_views, mix_lists
from distcse.models import resolve_model
from distcse.models.student import layers_of
from distcse.recipe import Recipe
from distcse.text import Corpus
from tests.counting import NumbersRead
from tests.training_step import TrainingStep
from tests.wikipedia import wiki_file

RANKCSE: dict[str, Any] = {"tau1": 0.05, "rank": {"form": "list_net", "tau2": 0.05, "tau3": 0.025}}
SIMCSE: dict[str, Any] = {"tau1": 0.05, "consistency": None, "rank": None}
DEV_SENTENCES, REFERENCE_SENTENCES = 3000, 37110
SAMPLES = 2
"""Batches of the reference's dev evaluation that are timed."""
LEAST_COSINE = 0.998
"""Of a bf16 step's gradient with the float32 step's."""
"""Of STS-B dev; of all splits of STS-B and SICK-R, which the public codes encode at every score."""
TOLERANCE = 1e-5


class Bench:
    """The models and jobs of one student size.

    Args:
        folder: Where they are put.
        options: How the script is run.
        size: `minilm`, or `base` with teachers of base's and large's size.
        n: Sentences of a step.
    """

    def __init__(self, folder: Path, options: Options, size: str, n: int) -> None:
        self.size, self.n, self.folder = size, n, folder
        self.setting = f"{size} student, N = {n}"
        second = {"minilm": "wide", "base": "large", "tiny": "tiny"}[size]
        student = MINILM if size == "minilm" else str(stand_in(folder / "student", size, 1))
        first = student if size == "minilm" else str(stand_in(folder / "first", size, 2))
        other = str(stand_in(folder / "second", second, 3))
        pooling = "mean" if size == "minilm" else "cls"
        self.teachers = [
            {"backbone": first, "pooling": pooling, "max_length": 32, "alpha": 1.0},
            {"backbone": other, "pooling": "cls", "max_length": 32, "alpha": 2.0},
        ]
        self.student, self._corpus, self._limit = student, wiki_file(options.data), max(3 * n, 64)
        self.spec, self.tables = prepared(self.recipe(RANKCSE, self.teachers, "rankcse"))

    def recipe(self, objective: dict[str, Any], teachers: list[dict[str, Any]], name: str, **training: Any) -> Recipe:
        """Of this student; the text and what is made of it are shared."""
        folder = self.folder / name
        shared = {"cache": str(self.folder / "cache"), "runs": str(folder / "runs")}
        recipe = list_recipe(
            folder,
            self._corpus,
            self.student,
            teachers,
            objective,
            self.n,
            self._limit,
            storage=shared,
            training=training,
        )
        return recipe

    def ours(self, objective: dict[str, Any], precision: str, live: bool = False, **training: Any) -> TrainingStep:
        """distcse's step."""
        distilled = objective is RANKCSE
        teachers = self.teachers if distilled else []
        name = f"{'rankcse' if distilled else 'simcse'}-{precision}"
        spec, tables = prepared(self.recipe(objective, teachers, name, precision=precision, **training))
        sources = live_sources(spec, Corpus.open(spec.corpus)) if live else table_sources(spec, tables)
        return TrainingStep(spec, sources)

    def theirs(self, ours: TrainingStep, distilled: bool) -> ContrastiveLoop:
        """The reference style's, from the same weights over the same batches."""
        from transformers import AutoModel

        teachers = [FrozenTeacher(load(t["backbone"]).eval(), t["pooling"], t["alpha"]) for t in self.teachers]
        model = AutoModel.from_pretrained(resolve_model(self.student))
        if getattr(model, "pooler", None) is not None:
            model.pooler.requires_grad_(False)
        loss = rankcse(teachers, 0.05, 0.05, 0.025) if distilled else simcse(0.05)
        return ContrastiveLoop(model, ours.task.model.projection, ours.tokens, loss)


def load(backbone: str) -> nn.Module:
    """A Hugging Face encoder as transformers loads it."""
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(resolve_model(backbone))
    return model


def equal_or_stop(ours: TrainingStep, theirs: ContrastiveLoop) -> None:
    """Compare losses and gradients on one batch, without dropout; `SystemExit` where they differ."""
    ours.task.model.eval()
    theirs.backbone.eval()
    theirs.projection.eval()
    mine, reference = ours.loss()[0], theirs.loss()
    mine.backward()
    reference.backward()
    apart = abs(mine.item() - reference.item()) / abs(reference.item())
    named = dict(ours.task.model.encoder.backbone.named_parameters())
    pairs = [
        (named[name].grad, p.grad)
        for name, p in theirs.backbone.named_parameters()
        if p.grad is not None and name in named
    ]
    pairs += [
        (a.grad, b.grad)
        for a, b in zip(ours.task.model.projection.parameters(), theirs.projection.parameters(), strict=True)
    ]
    difference = torch.cat([(a - b).flatten() for a, b in pairs]).norm()  # type: ignore[operator]
    gradient = float(difference / torch.cat([b.flatten() for _, b in pairs]).norm())  # type: ignore[union-attr]
    print(
        f"against the reference style: loss {mine.item():.6f}, apart by {apart:.1e}; gradient by {gradient:.1e}",
        flush=True,
    )
    if apart > TOLERANCE or gradient > 10 * TOLERANCE:
        raise SystemExit("the two steps do not compute the same; nothing is timed")
    for model in (ours.task.model, theirs.backbone, theirs.projection):
        model.zero_grad(set_to_none=True)


def near_or_stop(exact: TrainingStep, half: TrainingStep) -> None:
    """Compare the gradients of a float32 and a bf16 step on one batch, without dropout; `SystemExit` where they point apart."""
    half.task.model.load_state_dict(exact.task.model.state_dict())
    gradients = []
    for step in (exact, half):
        step.task.model.eval()
        step.loss()[0].backward()
        found = [p.grad.flatten() for p in step.task.model.parameters() if p.grad is not None]
        gradients.append(torch.cat(found).double())
        step.task.model.zero_grad(set_to_none=True)
    cosine = float(torch.cosine_similarity(*gradients, dim=0))
    print(f"bf16 against fp32: cosine of the gradients {cosine:.5f}", flush=True)
    if not cosine >= LEAST_COSINE:
        raise SystemExit("the bf16 step learns something else; nothing is timed")


def measure(options: Options) -> Report:
    """All rows of this script."""
    effort = Effort(pairs=options.pairs, shortest=0.0 if options.quick else 0.5, warmups=1 if options.quick else 3)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options, "tiny" if options.quick else "minilm", 16 if options.quick else 64)
        if options.wants(1, 6):
            figures += beside_simcse(bench, effort)
        if options.wants(2, 3, 4, 31):
            figures += beside_reference(bench, options, effort)
        if options.wants(12, 34):
            figures += counts(bench)
    return Report("step", machine(), {"pairs": options.pairs, "threads": 1}, figures, options.quick)


def beside_simcse(bench: Bench, effort: Effort) -> list[Figure]:
    """Rows 1 and 6: what distillation adds to a step."""
    ours = {
        (name, precision): bench.ours(objective, precision)
        for name, objective in (("RankCSE", RANKCSE), ("SimCSE", SIMCSE))
        for precision in fast_precisions()
    }
    component, plain = parts_of(ours["RankCSE", "fp32"], ours["SimCSE", "fp32"])
    near = {f"{name} {precision}": timed(step) for (name, precision), step in ours.items()}
    near |= {"lists and losses": timed(component), "InfoNCE": timed(plain)}
    close = interleave(near, effort.at_least(25), again=f"SimCSE {fast_precisions()[-1]}")
    at, noise = bench.setting, close.noise()
    found = [
        *(of_ratio(1, kind, close, f"RankCSE {kind}", f"SimCSE {kind}", at) for kind in fast_precisions()),
        of_spread(
            1,
            "1 + component sum",
            close.of(lambda s: 1 + (s["lists and losses"] - s["InfoNCE"]) / s["SimCSE fp32"]),
            at,
        ),
    ]
    lengths = [len(row) for row in ours["RankCSE", "fp32"].tokens(0)]
    work = 2 * 3 * forward_flops(bench.size, lengths) / 1e9
    for precision in fast_precisions():
        rate = close.of(lambda s, precision=precision: work / s[f"RankCSE {precision}"])  # type: ignore[misc]
        found.append(of_spread(6, f"{precision}, one core", rate, at, noise))
    return found


def beside_reference(bench: Bench, options: Options, effort: Effort) -> list[Figure]:
    """Rows 2 to 4 and 31's share: steps and scores of the public loops, and ours.

    The share is that of the papers' batch size, twice this one: a score costs as much at any, and the steps between two do not.
    """
    equal_or_stop(live := bench.ours(RANKCSE, "fp32", live=True), bench.theirs(live, True))
    ours = {precision: bench.ours(RANKCSE, precision) for precision in fast_precisions()}
    if "bf16" in ours:
        near_or_stop(ours["fp32"], ours["bf16"])
    theirs, dev = bench.theirs(ours["fp32"], True), DevEvaluations(bench, ours["fp32"], options)
    wide = bench.ours(RANKCSE, "fp32", batch_size=2 * bench.n)
    ways = {f"RankCSE {precision}": timed(step) for precision, step in ours.items()}
    ways |= {
        "reference": timed(theirs),
        "wide": timed(wide),
        "dev": timed(dev.ours),
        "dev, reference": timed(dev.theirs),
    }
    rounds = interleave(ways, effort.at_most(9), again=f"RankCSE {fast_precisions()[-1]}")

    def score(seconds: Any) -> float:
        return float(DEV_SENTENCES / dev.dev_sampled * seconds["dev"])

    def epochs(seconds: Any) -> float:
        reference = 125 * seconds["reference"] + dev.many * seconds["dev, reference"]
        return float(reference / (125 * seconds["RankCSE fp32"] + score(seconds)))

    share = rounds.of(lambda s: 100 * score(s) / (score(s) + 125 * s["wide"]))
    terms = {name: rounds.of(lambda s, name=name: s[name]).median for name in ways}  # type: ignore[misc]
    noise, every = rounds.noise(), "share of training at every 125 steps"
    return [
        *(
            of_ratio(row, precision, rounds, "reference", f"RankCSE {precision}", bench.setting)
            for row, precision in zip((2, 3), fast_precisions(), strict=False)
        ),
        of_spread(4, "125 steps and one score", rounds.of(epochs), f"{bench.setting}, tables made", noise, **terms),
        of_spread(31, every, share, f"{bench.size} student, N = {2 * bench.n}", noise),
    ]


def parts_of(distilled: TrainingStep, contrastive: TrainingStep) -> tuple[Any, Any]:
    """What a distilled step does that a SimCSE step does not, and its counterpart there: lists and losses alone."""
    n, width = distilled.section.batch_size, distilled.task.model.encoder.dimension
    z1, z2 = (torch.randn(n, width, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in (1, 2))
    teachers = [source._teacher for source in distilled.task._clients]  # type: ignore[attr-defined]
    weights = [teacher.alpha for teacher in distilled.task._recipe.teachers.encoders]
    columns = distilled.rows(0)[None, :]

    def lists_and_losses() -> None:
        lists = torch.stack([torch.from_numpy(teacher.similarities(columns, slice(None))[0]) for teacher in teachers])
        loss, _ = distilled.task._objective(gather_views(z1, z2), TeacherOutputs(mix_lists(lists, weights)))
        torch.autograd.grad(loss, (z1, z2))

    def info_nce() -> None:
        loss, _ = contrastive.task._objective(gather_views(z1, z2))
        torch.autograd.grad(loss, (z1, z2))

    return lists_and_losses, info_nce


class DevEvaluations:
    """Samples of what a dev score costs either way, per sentence: ours of STS-B dev, theirs of all splits of two sets."""

    def __init__(self, bench: Bench, step: TrainingStep, options: Options) -> None:
        from transformers import AutoTokenizer

        pairs = labelled_dev(options.data)
        every = [*pairs.first, *pairs.second]
        stride = 50 if options.quick else 10
        self._texts = every[::stride]
        self.dev_sampled = len(self._texts)
        sentences: list[str] = []
        for name in ("stsb", "sickr"):
            for file in sorted((options.data / "sts" / name).iterdir()):
                table = read_table(file)
                sentences += [*table.texts("sentence1"), *table.texts("sentence2")]
        assert len(sentences) == REFERENCE_SENTENCES
        # Full batches, as they come of all sentences by length: the fewer there are, the worse a sample fills them.
        batches = batches_of(sentences, 8 if options.quick else 128)
        picked = [batches[(2 * number + 1) * len(batches) // (2 * SAMPLES)] for number in range(SAMPLES)]
        self._batches = [[sentences[index] for index in batch] for batch in picked]
        self.many = len(batches) / SAMPLES
        self._encoder = step.task.model.encoder
        self._model, self._tokenizer = load(bench.student), AutoTokenizer.from_pretrained(resolve_model(bench.student))

    def ours(self) -> None:
        """As `DevMetric` scores: different sentences once."""
        self._encoder.eval()
        VectorModel(self._encoder.encode).prepare(self._texts)

    def theirs(self) -> None:
        """As SentEval's batcher feeds the public codes."""
        for texts in self._batches:
            encode(self._model, self._tokenizer, texts)


def counts(bench: Bench) -> list[Figure]:
    """Row 12's training part, through the maps of a layer in the middle, and row 34: counted."""
    step = bench.ours(RANKCSE, "fp32")
    real = 2 * sum(len(row) for number in range(3) for row in step.tokens(number))
    processed: list[int] = []
    middle = layers_of(step.task.model.encoder.backbone)[1]
    first = next(module for module in middle.modules() if isinstance(module, nn.Linear))
    hook = first.register_forward_hook(lambda _, given, found: processed.append(given[0].shape[:2].numel()))
    for _ in range(3):
        step()
    hook.remove()
    with NumbersRead() as read:
        for _ in range(3):
            step()
    return [
        counted(12, "training", round(real / sum(processed), 4), bench.setting),
        counted(34, "numbers read from tensors a step", read.count / 3, bench.setting),
    ]


if __name__ == "__main__":
    script("benchmarks.step", __doc__, measure)
