"""Rows 12 (Trans-Encoder), 20, 21 and 23: pair scoring and steps of Trans-Encoder, and DiffCSE's step.

python -m benchmarks.pairs --data ../shared/data [--quick] [--rows 20 21]
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.material import MINILM, fast_precisions, list_recipe, masked_stand_in, prepared, stand_in
from benchmarks.options import Options, script
from benchmarks.protocol import Effort, Figure, Report, counted, interleave, machine, of_ratio, of_spread, timed
from benchmarks.reference_style import ContrastiveLoop, PairLoop, ReplacedTokens, contrastive, score_bi, score_cross
from benchmarks.step import equal_or_stop, load
from distcse.evaluation import PairScores, VectorModel, read_table
from distcse.models import CrossEncoder, Encoder, resolve_model
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.detection import choose_positions, mask_chosen
from distcse.models.frozen_pass import by_length
from distcse.recipe import LoopSection
from distcse.runs.mutual.pair_task import PairTask, PairTokens
from distcse.training.dropout_rng import dropout_rng
from distcse.training.engines import make_engine
from distcse.training.trainer import training_step
from tests.counting import with_padding
from tests.pairs import bi_tokens, cross_tokens, make_pairs
from tests.training_step import TrainingStep
from tests.wikipedia import wiki_file

BI, CROSS = 128, 32
"""Pairs of a step (Trans-Encoder, Table 16)."""


def measure(options: Options) -> Report:
    """All rows of this script."""
    effort = Effort(pairs=options.pairs, shortest=0.0 if options.quick else 0.5, warmups=1 if options.quick else 3)
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.wants(12, 20, 21):
            found += trans_encoder(Path(folder), options, effort)
        if options.wants(23):
            found += diffcse(Path(folder), options, effort)
    return Report("pairs", machine(), {"pairs": options.pairs, "threads": 1}, found, options.quick)


def sts_pairs(data: Path) -> list[tuple[str, str]]:
    """The unlabeled STS pairs, in a fixed random order."""
    (file,) = (data / "pairs" / "sts_unlabelled").iterdir()
    table = read_table(file)
    pairs = list(zip(table.texts("sentence1"), table.texts("sentence2"), strict=True))
    return [pairs[row] for row in np.random.default_rng(0).permutation(len(pairs))]


class OurPairStep:
    """distcse's step on pairs, as `train` takes it."""

    def __init__(self, encoder: Encoder | CrossEncoder, tokens: PairTokens, section: LoopSection) -> None:
        labels = np.linspace(0, 1, tokens.number, dtype=np.float32)
        self.task = PairTask(encoder, tokens, labels, section, None, 10**9, seed=0)
        self.engine = make_engine(self.task.model, section, self.task.rows, None)
        self.step = 0

    def __call__(self) -> None:
        """One step."""
        self.task.model.train()
        training_step(self.engine, self.task, self.task.prepare_batch(self.step, self.engine.device), 2e-5)
        self.step += 1

    def loss(self) -> torch.Tensor:
        """The step's loss, without an update."""
        inputs = self.task.prepare_batch(self.step, self.engine.device)
        return self.task.compute_loss(inputs.loss_inputs, self.engine.forward(inputs.model_inputs))[0]


def trans_encoder(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Rows 12, 20 and 21. Mean pooling, MiniLM's size, fp32."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    sizes = (16, 8) if options.quick else (BI, CROSS)
    pairs = sts_pairs(options.data)
    kept = pairs[: 64 if options.quick else 2048]
    stored = make_pairs(folder, *zip(*kept, strict=True))
    bi, cross = Encoder.load(MINILM, pooling="mean", max_length=32), CrossEncoder.fresh(resolve_model(MINILM), 64)
    sentence_tokens, pair_tokens = bi_tokens(bi, stored), cross_tokens(cross, stored, both_orders=False)
    sections = [
        LoopSection(batch_size=size, engine="torch", epochs=1e6, warmup=0.0, precision="fp32") for size in sizes
    ]
    ours = {
        "bi": OurPairStep(bi, sentence_tokens, sections[0]),
        "cross": OurPairStep(cross, pair_tokens, sections[1]),
    }
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MINILM))
    their_bi = load(MINILM)
    their_cross = AutoModelForSequenceClassification.from_pretrained(resolve_model(MINILM), num_labels=1)
    their_cross.load_state_dict(cross.model.state_dict())

    def rows(kind: str) -> Callable[[int], tuple[Any, Any, torch.Tensor]]:
        task = ours[kind].task

        def batch(step: int) -> tuple[Any, Any, torch.Tensor]:
            rows = task.rank_rows(step)
            labels = torch.from_numpy(task.labels[rows])
            if kind == "bi":
                both, _ = sentence_tokens.texts(rows)
                return both[: len(rows)], both[len(rows) :], labels
            return *pair_tokens.texts(rows), labels

        return batch

    theirs = {
        "bi": PairLoop(their_bi, rows("bi"), cross=False),
        "cross": PairLoop(their_cross, rows("cross"), cross=True),
    }
    for kind in ("bi", "cross"):
        ours[kind].task.model.eval()
        theirs[kind].model.eval()
        _equal_or_stop(kind, ours[kind], theirs[kind])
    found = [_filled(ours)]
    scored = kept[: 32 if options.quick else 64]
    sides = [one for one, _ in scored], [other for _, other in scored]
    sentences, both = (
        Batches([*dict.fromkeys([*(one for one, _ in pairs), *(other for _, other in pairs)])], bi),
        Batches(pairs, cross),
    )
    bi_start, cross_start, half = copy.deepcopy(bi).eval(), copy.deepcopy(cross).eval(), copy.deepcopy(cross).eval()
    for model, precision in ((bi_start, "fp32"), (cross_start, "fp32"), (half, "bf16")):
        use_mkldnn_linear(model, precision)
    plain_bi, plain_cross = load(MINILM), copy.deepcopy(their_cross)
    ways: dict[str, Any] = {
        "bi scores": lambda: sentences.through(bi_start.encode),
        "cross scores": lambda: both.through(cross_start.score),
        "bi step": ours["bi"],
        "cross step": ours["cross"],
        "bi scores, reference": lambda: score_bi(plain_bi, tokenizer, scored),
        "cross scores, reference": lambda: score_cross(plain_cross, tokenizer, scored),
        "bi step, reference": theirs["bi"],
        "cross step, reference": theirs["cross"],
    }
    if "bf16" in fast_precisions():
        ways["cross scores, bf16"] = lambda: both.through(partial(half.score, precision="bf16"))
    for kind, model in (("bi", VectorModel.of(bi_start)), ("cross", PairScores(cross_start))):
        apart = np.abs(model.similarities(*sides) - ways[f"{kind} scores, reference"]()).max()  # type: ignore[operator]
        print(f"{kind} scores against the reference style: apart by at most {apart:.1e}", flush=True)
        if apart > 1e-4:
            raise SystemExit("the two ways do not give the same scores; nothing is timed")
    filled = (sentences.real + both.real) / (sentences.processed + both.processed)
    found.append(counted(12, "Trans-Encoder scoring", round(filled, 4), f"{len(pairs):,} pairs, both formulations"))
    rounds = interleave({name: timed(way) for name, way in ways.items()}, effort.at_most(11), again="bi scores")
    many = {"bi scores": sentences.many, "cross scores": both.many, "cross scores, bf16": both.many}
    many |= dict.fromkeys(("bi scores, reference", "cross scores, reference"), len(pairs) / len(scored))
    at = f"MiniLM, {len(pairs):,} pairs, from samples of them"
    parts = [
        ("bi, fp32", "bi scores", "bi scores, reference"),
        ("cross, fp32", "cross scores", "cross scores, reference"),
        ("bf16", "cross scores, bf16", "cross scores, reference"),
    ]
    for part, mine, reference in parts[: len(fast_precisions()) + 1]:
        fit = many[reference] / many[mine]
        ratio = rounds.of(lambda s, mine=mine, reference=reference, fit=fit: fit * s[reference] / s[mine])  # type: ignore[misc]
        found.append(of_spread(20, part, ratio, f"cross, {at}" if part == "bf16" else at, rounds.noise()))
    for kind, size in zip(("bi", "cross"), sizes, strict=True):
        found.append(
            of_ratio(21, f"{kind} step", rounds, f"{kind} step, reference", f"{kind} step", f"MiniLM, {size} pairs")
        )

    def cycle(seconds: Any, suffix: str) -> float:
        """Bi scores, cross learns both orders, cross scores, bi learns ten epochs."""
        scores = sum(many[way] * seconds[way] for way in (f"bi scores{suffix}", f"cross scores{suffix}"))
        steps = (
            2 * len(pairs) / sizes[1] * seconds[f"cross step{suffix}"]
            + 10 * len(pairs) / sizes[0] * seconds[f"bi step{suffix}"]
        )
        return float(scores + steps)

    full_cycle = rounds.of(lambda s: cycle(s, ", reference") / cycle(s, ""))
    terms = {name: rounds.of(lambda s, name=name: s[name]).median for name in ways}  # type: ignore[misc]
    return [*found, of_spread(21, "full cycle", full_cycle, "MiniLM, from its parts", rounds.noise(), **terms)]


class Batches:
    """Batches by length of all that a model scores in the task, each sentence or pair once; some of them represent all.

    A sample of pairs would not do: what is sorted by length is filled the better the more there is of it.

    Attributes:
        real: Tokens of all batches.
        processed: The same with their padding.
        many: Number of all batches over the number of sampled ones.
    """

    SAMPLES = 2

    def __init__(self, texts: Sequence[Any], model: Encoder | CrossEncoder) -> None:
        read = model.token_ids(texts)
        once = {tuple(row): index for index, row in enumerate(read[0] if isinstance(model, CrossEncoder) else read)}
        ids, indices = list(once), list(once.values())
        batches = by_length(ids, 4096)
        self.real, self.processed = sum(map(len, ids)), with_padding(ids, batches)
        picked = [batches[(2 * number + 1) * len(batches) // (2 * self.SAMPLES)] for number in range(self.SAMPLES)]
        self._sampled = [[texts[indices[index]] for index in batch] for batch in picked]
        self.many = len(batches) / self.SAMPLES

    def through(self, score: Callable[[Sequence[Any]], object]) -> None:
        """The samples, one batch after the other."""
        for texts in self._sampled:
            score(texts)


def _equal_or_stop(kind: str, ours: OurPairStep, theirs: PairLoop) -> None:
    mine, reference = ours.loss(), theirs.loss()
    mine.backward()
    reference.backward()
    apart = abs(mine.item() - reference.item()) / abs(reference.item())
    named = dict(theirs.model.named_parameters())
    inner = ours.task.model.encoder
    both = [
        (p.grad, named[name].grad)
        for name, p in (inner.backbone if kind == "bi" else inner.model).named_parameters()
        if p.grad is not None and name in named and named[name].grad is not None
    ]
    difference = torch.cat([(a - b).flatten() for a, b in both]).norm()  # type: ignore[operator]
    gradient = float(difference / torch.cat([b.flatten() for _, b in both]).norm())  # type: ignore[union-attr]
    print(
        f"{kind} step against the reference style: loss {mine.item():.6f}, apart by {apart:.1e}; gradient of {len(both)} "
        f"weights by {gradient:.1e}",
        flush=True,
    )
    if not both or apart > 1e-5 or gradient > 1e-4:
        raise SystemExit("the two steps do not compute the same; nothing is timed")
    for model in (ours.task.model, theirs.model):
        model.zero_grad(set_to_none=True)


def _filled(steps: dict[str, OurPairStep]) -> Figure:
    """Tokens of both formulations' training batches over what is processed, over 20 batches of each."""
    real = processed = 0
    for step in steps.values():
        for number in range(20):
            (stream,) = step.task.prepare_batch(number, torch.device("cpu")).model_inputs
            for part in stream.parts:
                assert part.token_index is not None
                real, processed = real + int(part.mask.sum()), processed + len(part.token_index)
    return counted(12, "Trans-Encoder training", round(real / processed, 4), "both formulations")


def diffcse(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Row 23: a student, a discriminator and a generator of MiniLM's size."""
    n, size = (8, "tiny") if options.quick else (32, "minilm")
    student = str(stand_in(folder / "student", size)) if options.quick else MINILM
    generator = str(masked_stand_in(folder / "generator", size))
    detection = {"weight": 0.005, "generator": generator, "masking_ratio": 0.3}
    objective = {"tau1": 0.05, "consistency": None, "rank": None, "detection": detection}
    sections: dict[str, Any] = {"student": {"projection": "batch_norm_mlp"}}
    ways = {}
    for name, section in (("ours", detection), ("masked only", {**detection, "replace": "masked_only"})):
        wanted = {**objective, "detection": section}
        spec, _ = prepared(
            list_recipe(folder / name, wiki_file(options.data), student, [], wanted, n, 3 * n, **sections)
        )
        ways[name] = TrainingStep(spec, [])
    ours = ways["ours"]
    theirs = reference_diffcse(ours, generator, student)
    logits = largest_logits(ours)
    timers = {**{name: timed(way) for name, way in ways.items()}, "reference": timed(theirs)}
    rounds = interleave(timers, effort.at_most(11), again="ours")
    at = f"{size} size, N = {n}"
    return [
        of_ratio(23, "identical semantics", rounds, "reference", "ours", at),
        of_ratio(23, "masked positions only", rounds, "reference", "masked only", at),
        counted(23, "largest logits", logits, at),
    ]


def largest_logits(ours: TrainingStep) -> float:
    """Peak size of the generator's logits in a step, in MB."""
    detector = ours.task.model.detector
    assert detector is not None
    sizes: list[float] = []

    def note(module: torch.nn.Module, given: Any, found: Any) -> None:
        sizes.append(found.logits.nbytes / 1e6)

    hook = detector._generator[0].register_forward_hook(note)
    ours()
    hook.remove()
    return max(sizes)


def reference_diffcse(ours: TrainingStep, generator: str, student: str) -> ContrastiveLoop:
    """The reference style's step; compared with ours on one batch, with the same masks, before it is returned."""
    from transformers import AutoModel, AutoModelForMaskedLM

    model = ours.task.model
    detector = model.detector
    assert detector is not None
    words, ratio = detector._words, detector._section.masking_ratio
    discriminator = AutoModel.from_pretrained(resolve_model(student))
    backbone = AutoModel.from_pretrained(resolve_model(student))
    for each in (discriminator, backbone):
        if getattr(each, "pooler", None) is not None:
            each.pooler.requires_grad_(False)
    fixed: dict[str, torch.Tensor] = {}

    def mask_tokens(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return fixed["masked"] if fixed else mask_chosen(ids, choose_positions(ids, mask, ratio, words), words)

    masked_lm = AutoModelForMaskedLM.from_pretrained(resolve_model(generator))
    replaced = ReplacedTokens(masked_lm, discriminator, detector.head, mask_tokens, words.cls)

    def loss(z1: torch.Tensor, z2: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        sentences = torch.stack([z1, z2], dim=1).flatten(0, 1)
        return contrastive(z1, z2, 0.05)[1] + 0.005 * replaced(ids, mask, sentences)

    theirs = ContrastiveLoop(backbone, model.projection, ours.tokens, loss, head=replaced)
    # Ours draws masks of both views, one view after the other, from the stream's seed; theirs alternate by row.
    batch = ours.task.prepare_batch(0, torch.device("cpu")).model_inputs
    (tokens, _), *_ = batch.streams
    both = tokens.ids.repeat(2, 1), tokens.mask.repeat(2, 1)
    with dropout_rng(batch.edit_seeds[0], torch.device("cpu")):
        masked = mask_chosen(both[0], choose_positions(*both, ratio, words), words)
    fixed["masked"] = masked.view(2, len(tokens.ids), -1).transpose(0, 1).flatten(0, 1)
    masked_lm.eval()
    replaced.discriminator.eval()
    equal_or_stop(ours, theirs)
    fixed.clear()
    masked_lm.train()
    replaced.discriminator.train()
    return theirs


if __name__ == "__main__":
    script("benchmarks.pairs", __doc__, measure)
