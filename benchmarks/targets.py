"""The 34 rows: what distcse asks of itself, on one CPU core and on one H200. Bounds are machine-read; prose is for people."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One quantity of a row.

    Attributes:
        name: As the scripts call it.
        must: Bound that it has to meet; None where it is only reported.
        moon: Bound that it would be good to meet, never a gate.
        unit: Of the figure; "x" is a ratio.
        needs: What distcse would need to have and has not; such a part is not measured.
        only_with: Kernel that the bound was set for; without it the figure is reported and not judged.
    """

    name: str
    must: str | None = None
    moon: str | None = None
    unit: str = "x"
    needs: str | None = None
    only_with: str | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table: its number, what it asks, and its parts on either kind of machine."""

    number: int
    title: str
    cpu: tuple[Part, ...] = ()
    gpu: tuple[Part, ...] = ()


ROWS = (
    Row(
        1,
        "distilled step / SimCSE step, cached teachers, same student path",
        (
            Part("fp32", "<= 1.02", "<= 1.005"),
            Part("bf16", "<= 1.02", "<= 1.005"),
            Part("1 + component sum", "<= 1.02", "<= 1.005"),
        ),
        (Part("bf16", "<= 1.03", "<= 1.01"),),
    ),
    Row(
        2,
        "RankCSE step: reference style / ours, fp32",
        (Part("fp32", ">= 2.6", ">= 3.2"),),
        (Part("bf16, live teachers under autocast", ">= 3.5", ">= 6"),),
    ),
    Row(
        3,
        "RankCSE step: reference style in fp32 / ours at its best precision",
        (Part("bf16", ">= 4.5", ">= 6", only_with="AMX"),),
        (Part("bf16", ">= 10", ">= 20"),),
    ),
    Row(
        4,
        "epoch with dev evaluations, text tokenized, tables made: reference style / ours",
        (Part("125 steps and one score", ">= 3", ">= 5"),),
        (Part("125 steps and one score", ">= 8", ">= 15"),),
    ),
    Row(
        5,
        "full RankCSE-base run, 1M sentences, 4 epochs, extrapolated",
        (),
        (Part("minutes", "<= 7", "<= 5", unit="min"),),
    ),
    Row(
        6,
        "arithmetic on real tokens; on a GPU of 989 TFLOP/s",
        (Part("fp32, one core", unit="GFLOP/s"), Part("bf16, one core", unit="GFLOP/s")),
        (
            Part("MFU base, N = 128", ">= 30", ">= 40", unit="%"),
            Part("MFU base, N = 128, compiled layers", ">= 30", ">= 40", unit="%"),
            Part("MFU large, N = 128", ">= 40", ">= 44", unit="%"),
        ),
    ),
    Row(
        7,
        "host work of a step: dispatched calls; on a GPU host time and busy share",
        (Part("aten calls, BERT-base step", "<= 8000", "<= 5000", unit="calls"),),
        (
            Part("host time a step", "<= 1.5", "<= 0.5", unit="ms"),
            Part("busy share", ">= 90", ">= 95", unit="%"),
        ),
    ),
    Row(
        8,
        "teacher forwards for T trials, E epochs, S seeds",
        (
            Part("sentence encodings of a first run / unique rows", "== 1"),
            Part("sentence encodings of a second run", "== 0", unit="sentences"),
            Part("sweep / T SimCSE trials, T = 16, E = 4", "<= 1.02"),
        ),
        (Part("sweep / T SimCSE trials, T = 16, E = 4", "<= 1.02"),),
    ),
    Row(
        9,
        "teachers' cache",
        (
            Part("bytes a sentence / 2 · Σ dimensions", "<= 1.01"),
            Part("time to open", "<= 1", unit="s"),
            Part("private memory of a worker that opens it", "<= 50", unit="MB"),
        ),
        (
            Part("resident", "<= 3.6", unit="GB", needs="a cache in GPU memory"),
            Part("gather", "<= 20", unit="µs", needs="a cache in GPU memory"),
        ),
    ),
    Row(
        10,
        "cached list against live fp32 list",
        (
            Part("largest difference of a cosine", "<= 0.0002", unit=""),
            Part("Kendall's τ of a list", ">= 0.9998", unit=""),
            Part("cosine of the ListMLE gradients", ">= 0.9999", unit=""),
        ),
        (
            Part("largest difference of a cosine, fp16 forward", "<= 0.0002", unit=""),
            Part("cosine of the ListMLE gradients, fp16 forward", ">= 0.9999", unit=""),
        ),
    ),
    Row(
        11,
        "teacher encode: sentence-transformers / ours",
        (
            Part("default (fp32) / bf16", ">= 3.2", ">= 4.5", only_with="AMX"),
            Part("tuned, same dtype (fp32)", ">= 1.15", ">= 1.35"),
        ),
        (
            Part("default (fp32) / fp16", ">= 15", ">= 30"),
            Part("tuned, same dtype (fp16)", ">= 2", ">= 4"),
            Part("share of the compute floor, base", ">= 50", unit="%"),
        ),
    ),
    Row(
        12,
        "real / processed tokens",
        (
            Part("teacher pass", ">= 0.995", unit=""),
            Part("training", ">= 0.97", unit=""),
            Part("Trans-Encoder scoring", ">= 0.97", unit=""),
            Part("Trans-Encoder training", ">= 0.97", unit=""),
        ),
        (
            Part("teacher pass", ">= 0.995", unit=""),
            Part("training", ">= 0.985", unit="", needs="packed tokens on a GPU"),
        ),
    ),
    Row(
        13,
        "full last layer / last layer for [CLS] only, step",
        (
            Part("MiniLM", ">= 1.1"),
            Part("base", ">= 1.03"),
        ),
        (Part("base", ">= 1.04"),),
    ),
    Row(
        14,
        "cosine, ListMLE, JS, ListNet together, forward and backward",
        (
            Part("N = 128", "<= 10", unit="ms"),
            Part("N = 1024", "<= 200", unit="ms"),
            Part("largest tensor of the losses / N²", "<= 2", unit=""),
        ),
        (Part("N = 128", "<= 0.15", unit="ms"), Part("N = 1024", "<= 0.5", unit="ms")),
    ),
    Row(
        15,
        "optimizer: default AdamW / fused",
        (Part("BERT-base", ">= 3"),),
        (Part("fused step, BERT-base", "<= 1.2", unit="ms"),),
    ),
    Row(
        16,
        "RankEncoder step / SimCSE step, N = 64, n = 100k, inline",
        (Part("MiniLM", "<= 1.15", "<= 1.05"), Part("base", "<= 1.02", "<= 1.01")),
        (Part("base", "<= 1.08", "<= 1.02"),),
    ),
    Row(
        17,
        "rank vectors, n = 100k: reference style / ours",
        (
            Part("exact", ">= 3.5"),
            Part("largest error of R, exact", "<= 1e-07", unit=""),
            Part("histogram", ">= 7", ">= 10"),
            Part("largest error of R, histogram", "<= 1e-05", unit=""),
        ),
        (Part("64 × 100k", "<= 0.4", "<= 0.15", unit="ms"),),
    ),
    Row(
        18,
        "RankEncoder step, n = 100k: reference style / ours",
        (Part("fp32", ">= 1.9", ">= 2.3"),),
        (Part("bf16", ">= 4"),),
    ),
    Row(
        19,
        "RankEncoder inference, 18.5k pairs, n = 100k",
        (
            Part("rankings a different sentence", "== 1"),
            Part("scipy pair by pair / ours", ">= 20"),
            Part("the same, ranks by histogram", ">= 20"),
        ),
        (Part("seconds", "<= 2", unit="s"),),
    ),
    Row(
        20,
        "Trans-Encoder, pair scoring: reference style / ours",
        (
            Part("bi, fp32", ">= 2.3", ">= 2.8"),
            Part("cross, fp32", ">= 2.3", ">= 2.8"),
            Part("bf16", ">= 6", ">= 9", only_with="AMX"),
        ),
        (Part("cross, bf16", ">= 6"),),
    ),
    Row(
        21,
        "Trans-Encoder, fp32: reference style / ours",
        (
            Part("bi step", ">= 1.75", ">= 2"),
            Part("cross step", ">= 1.75", ">= 2"),
            Part("full cycle", ">= 1.75", ">= 2"),
        ),
        (Part("full base run of 3 cycles, extrapolated", "<= 3", "<= 1.5", unit="min"),),
    ),
    Row(
        22,
        "mutual group of two equal tracks",
        (Part("idle share, two workers", "<= 10", "<= 5", unit="%"),),
    ),
    Row(
        23,
        "DiffCSE step: reference style / ours",
        (
            Part("identical semantics", ">= 1.2"),
            Part("masked positions only", ">= 1.35"),
            Part("largest logits", "<= 64", unit="MB"),
        ),
        (Part("identical semantics", ">= 1.5"), Part("masked positions only", ">= 2")),
    ),
    Row(
        24,
        "Ray Train worker's loop / bare loop, identical step",
        (
            Part("MiniLM, no report", "<= 1.01"),
            Part("MiniLM, a report every 125 steps", "<= 1.02"),
            Part("tiny model, added", unit="ms"),
            Part("one report", unit="ms"),
        ),
    ),
    Row(
        25,
        "DeepSpeed / bare, one process",
        (
            Part("MiniLM, stage 0", "<= 1.03"),
            Part("MiniLM, stage 1", "<= 1.1"),
            Part("MiniLM, stage 2", "<= 1.1"),
            Part("tiny model, stage 0, added", unit="ms"),
            Part("tiny model, stage 1, added", unit="ms"),
            Part("tiny model, stage 2, added", unit="ms"),
        ),
    ),
    Row(
        26,
        "remote calls of the steady step; waiting for teachers",
        (
            Part("calls a step and teacher", "<= 0.03125", unit=""),
            Part("share of a step spent waiting, tables", "<= 2", unit="%"),
            Part("share of a step spent waiting, live", "<= 2", unit="%"),
        ),
    ),
    Row(
        27,
        "teacher pass on several actors",
        (Part("2 actors, real efficiency", ">= 0.9", unit=""),),
    ),
    Row(
        28,
        "data-parallel student",
        (
            Part("gradient of two workers against one, relative", "<= 1e-05", unit=""),
            Part("weak, 2 workers, real", unit=""),
        ),
    ),
    Row(
        29,
        "time to the first step",
        (
            Part("Ray cold / bare", "<= 3", "<= 2"),
            Part("second trial of a sweep / bare", "<= 1.2"),
        ),
    ),
    Row(
        30,
        "memory of a teacher's actor above the imports / (1.25 · weights + 64 MB)",
        (Part("MiniLM, fp32", "<= 1"), Part("BERT-base size, fp32", "<= 1")),
        (Part("base, fp16: memory / weights", "<= 1.1"),),
    ),
    Row(
        31,
        "dev evaluation",
        (
            Part("sentences encoded a score", "<= 3000", unit="sentences"),
            Part("share of training at every 125 steps", "<= 3", unit="%"),
        ),
        (Part("share of training at every 125 steps", "<= 2", unit="%"),),
    ),
    Row(
        32,
        "tokenization",
        (
            Part("passes over the corpus, first run", "== 1", unit="passes"),
            Part("passes over the corpus, second run", "== 0", unit="passes"),
            Part("rate, one core", ">= 15000", unit="sentences/s"),
        ),
        (Part("wait for data a step", "<= 0.1", unit="ms"),),
    ),
    Row(
        33,
        "large batch: gradient cache",
        (
            Part("cost", "<= 1.6", "<= 1.4"),
            Part("memory, N = 2048 / N = 256", "<= 1.05"),
        ),
        (Part("cost", "<= 1.4", "<= 1.34"),),
    ),
    Row(
        34,
        "waits of the host for the device",
        (Part("numbers read from tensors a step", "<= 0.02", unit=""),),
        (Part("synchronizations a step", "<= 0.02", unit=""),),
    ),
)
"""All rows, in order. Rows 22 and 24 to 29 have no GPU column here: the GPU script runs without Ray."""


def part_of(number: int, name: str, gpu: bool = False) -> Part:
    """A part by row and name. `KeyError` where the targets have none: a figure nobody asked for."""
    row = ROWS[number - 1]
    for part in row.gpu if gpu else row.cpu:
        if part.name == name:
            return part
    raise KeyError(f"row {number} has no part {name!r} on {'a GPU' if gpu else 'a CPU'}")
