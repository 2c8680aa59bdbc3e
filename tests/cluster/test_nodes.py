"""Where actors are put: on nodes of the labels that a recipe names, or a message at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.errors import RunError
from distcse.student.ray_train import resources_per_worker
from tests.jobs import make_recipe

pytestmark = pytest.mark.cluster


def test_labels_that_no_node_has_are_refused_at_once(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], cluster: None
) -> None:
    import ray

    (node,) = ray.nodes()
    label = next(iter(node["Labels"].items()))
    for knob in ("training.nodes", "teachers.nodes"):
        recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.workers=1")
        assert resources_per_worker(recipe)["CPU"] >= 1
        there = make_recipe(
            tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.workers=1", f"{knob}={dict([label])}"
        )
        assert resources_per_worker(there) == resources_per_worker(recipe)
        nowhere = make_recipe(
            tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.workers=1", f"{knob}={{role: students}}"
        )
        with pytest.raises(RunError, match=rf"no node has the labels role=students of {knob}; .* ray start --labels"):
            resources_per_worker(nowhere)
