"""CONTRIBUTING.md, "Add a loss": its three parts, added to a copy of the package, make a loss that trains."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

TRAIN_AND_COMPARE = """
import json, sys
from pathlib import Path

import numpy as np
import torch

from distcse.text import BatchSampler
from distcse.text.sampler import split_held_out
from distcse.events import Reporter, StepReport
from tests.backends import run
from distcse.models import Encoder
from tests.jobs import make_recipe

folder, student, teacher = (Path(path) for path in sys.argv[1:])
lines = (folder / "lines.txt").read_text().splitlines()
recipe = make_recipe(
    folder, student, [teacher], lines, "objective={info_nce: null, consistency: null, rank: null, margin_mse: {scale: 0.5}}",
    "student.dropout=0", "student.projection=none", "training.max_steps=2", "training.warmup=0", "training.log_every=1",
    "training.gradient_clipping=0", "evaluation.dev=none", "evaluation.final_suites=[]",
)
assert recipe.objective.margin_mse.weight == 1.0
events = []
run(recipe, Reporter(events.append))
reported = [event.losses["margin_mse"] for event in events if isinstance(event, StepReport)]

# The same two steps inline.
rows, _ = split_held_out(len(lines), recipe.evaluation.num_heldout, recipe.seed)
sampler = BatchSampler(rows, recipe.training.batch_size, recipe.seed)
known = Encoder.from_section(recipe.teachers.encoders[0])
encoder = Encoder.from_section(recipe.student).train()
optimizer = torch.optim.AdamW(encoder.parameters(), lr=recipe.training.lr, weight_decay=0.0)
expected = []
for step, factor in ((0, 1.0), (1, 0.5)):  # the learning rate falls linearly to 0
    texts = [lines[row] for row in sampler.batch(step)]
    tokens = encoder.tokenizer(texts, truncation=True, max_length=encoder.max_length, padding=True, return_tensors="pt")
    vectors = torch.nn.functional.normalize(encoder(tokens["input_ids"], tokens["attention_mask"]), dim=1)
    targets = torch.from_numpy(known.encode(texts, normalize=True)).half().float()  # a table is stored in half precision
    student_margins, teacher_margins = (1 - vectors @ vectors.T, 1 - targets @ targets.T)
    loss = ((student_margins - 0.5 * teacher_margins) ** 2).mean()
    expected.append(loss.item())
    optimizer.zero_grad()
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = factor * recipe.training.lr
    optimizer.step()
print(json.dumps([reported, expected]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, to which the parts of the page have been added."""
    folder = tmp_path_factory.mktemp("with_the_loss")
    shutil.copytree(ROOT / "distcse", folder / "distcse", ignore=shutil.ignore_patterns("__pycache__"))
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a loss")[1].split("\n## ")[0]
    (_, settings), (_, key), (file, mathematics) = re.findall(r'```python title="(.+?)"\n(.*?)```', section, re.S)
    assert file == "distcse/losses/margin_mse.py" and not (folder / file).exists()
    (folder / file).write_text(mathematics, encoding="utf-8")
    objective = folder / "distcse" / "recipe" / "objective.py"
    source = objective.read_text(encoding="utf-8")
    for place, added in (("class ObjectiveSection(", f"{settings}\n\n"), ("    custom: dict[", key)):
        assert source.count(place) == 1
        source = source.replace(place, added + place)
    objective.write_text(source, encoding="utf-8")
    return folder


def python(package: Path, *arguments: str) -> str:
    """Run Python with the copy of the package."""
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=package, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_steps_have_the_losses_of_an_inline_calculation(
    package: Path, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(sentences[:120]))
    student, teacher = str(tiny("bert")), str(tiny("minilm"))
    output = python(package, "-c", TRAIN_AND_COMPARE, str(tmp_path), student, teacher)
    reported, expected = json.loads(output.splitlines()[-1])
    assert len(reported) == 2 and reported == pytest.approx(expected, rel=2e-3)
    assert reported[0] != pytest.approx(reported[1], rel=1e-2)
