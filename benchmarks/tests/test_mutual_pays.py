"""The measured settings of strong encoders are those of the packaged recipe."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from benchmarks.mutual_pays import recipe_of
from distcse.recipe import MutualRecipe, read_recipe

ROW = "e5 in its own band, both formulations by dev, lr 2e-5, batch 32"


def test_three_mutual_has_the_settings_of_the_measured_row(tmp_path: Path) -> None:
    options = Namespace(models=tmp_path, data=tmp_path, runs=tmp_path, cycles=1, pairs=10_000, max_steps=None)
    measured, packaged = (
        recipe_of(options, ROW, "task", 0),
        read_recipe("three-mutual", [f"evaluation.data={tmp_path}"]),
    )
    assert isinstance(packaged, MutualRecipe)
    assert (measured.bi, measured.cross, measured.pairs) == (packaged.bi, packaged.cross, packaged.pairs)
    decided_by_device = packaged.mutual.model_copy(update={"precision": measured.mutual.precision})
    assert measured.mutual == decided_by_device
    for ours, theirs in zip(measured.groups, packaged.groups, strict=True):
        assert Path(ours.backbone).name in (Path(theirs.backbone).name, "model")
        assert ours == theirs.model_copy(update={"backbone": ours.backbone})
