"""Evaluation, layer selection and mining on a cluster's GPUs, which Ray has and the machine has not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from distcse.cluster.backend import RayBackend
from distcse.cluster.cluster import cluster
from distcse.events import Event, Reporter, StageProgress
from distcse.models import Encoder, EncoderHandle
from distcse.recipe import MutualRecipe, load_recipe, read_recipe, with_values
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory, write_recipe
from distcse.runs.distillation.final_evaluation import ScoredStudent, final_scores, labelled_tasks
from distcse.runs.distillation.layer_selection import with_chosen_layers
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.runs.mutual.pairs import load_pairs
from distcse.runs.stoppable_evaluation import delete_results
from distcse.storage import open_store
from distcse.text import Corpus
from tests.commands import run_command
from tests.devices import comparable, recorded_loads
from tests.jobs import make_recipe
from tests.models import make_cross_encoder
from tests.pairs import make_mutual_recipe

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def work_on_two_gpus(file: str, mutual_file: str) -> None:
    """A driver: do the work on Ray's GPUs, then in this process, and write what is equal and what this process loaded."""
    import torch

    torch.set_num_threads(1)
    with cluster():
        _work(file, mutual_file)


def _work(file: str, mutual_file: str) -> None:
    recipe, events = load_recipe(file, []), list[Event]()
    on_gpus, here, reporter = RayBackend(), LocalBackend(), Reporter(events.append)
    labelled = labelled_tasks(recipe)
    with recorded_loads() as loaded:
        prepared = PreparedCorpus.prepare(recipe, on_gpus, reporter)
        directory = RunDirectory.create(prepared.recipe)
        directory.model.mkdir()
        start, corpus, chosen = prepared.initial_encoder, prepared.corpus, prepared.recipe
        student = EncoderHandle(partial(Encoder.from_section, chosen.student))
        students = [
            ScoredStudent("start", chosen.student.backbone, start),
            ScoredStudent("student", str(directory.model), student, trained=directory.model),
        ]
        remote = final_scores(chosen, corpus, labelled, students, directory, on_gpus, reporter).evaluation
        assert remote is not None
        delete_results(directory.store)
        mutual = read_recipe(mutual_file, [])
        assert isinstance(mutual, MutualRecipe)
        mined = load_pairs(mutual, RunDirectory.create(mutual).path, on_gpus, reporter)
        loaded_before = list(loaded)
    other_cache = Path(f"{recipe.storage.cache}-2")
    other_cache.mkdir()
    fresh = with_values(recipe, {"storage.cache": str(other_cache)})
    layers = with_chosen_layers(fresh, Corpus.open(corpus.directory), here, Reporter()).student.layers
    local = final_scores(chosen, corpus, labelled, students, directory, here, Reporter()).evaluation
    assert local is not None
    found = {
        "loaded": loaded_before,
        "layers": [chosen.student.layers, layers],
        "evaluations are equal": comparable(remote) == comparable(local),
        "pairs are equal": mined.fingerprint
        == load_pairs(mutual, RunDirectory.create(mutual).path, here, Reporter()).fingerprint,
        "stages": [event.name for event in events if isinstance(event, StageProgress) and event.finished],
        "searched": sum(isinstance(event, StageProgress) and event.name == "layers" for event in events),
    }
    (Path(file).parent / "found.json").write_text(json.dumps(found))


def test_models_are_evaluated_searched_and_mined_on_gpus_with_the_results_of_one_process(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> None:
    scorer = make_cross_encoder(tmp_path / "scorer", tiny("bert"))
    suites = "evaluation.final_suites=[sts, ranking, geometry, retrieval, agreement]"
    ranks = "evaluation.rank_inference={num_references: 100}"
    auto = ("student.layers=auto", "student.num_layers=2", f"evaluation.data={labelled}", suites, ranks)
    make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), scorer], sentences)
    file = tmp_path / "recipe.yaml"
    write_recipe(open_store(file.parent), load_recipe(str(file), auto))
    corpus = tmp_path / "corpus.txt"
    source = f"pairs={{mine: {{corpus: {{path: '{corpus}'}}, pairs: 100, num_neighbors: 10}}}}"
    mutual = make_mutual_recipe(tmp_path / "mutual", {"bert": tiny("bert")}, sentences, source)
    write_recipe(open_store(tmp_path / "mutual"), mutual)
    files = str(file), str(tmp_path / "mutual" / "recipe.yaml")
    script = f"from tests.cluster.test_devices import work_on_two_gpus; work_on_two_gpus{files!r}"
    done = run_command([sys.executable, "-c", script], RAY_OVERRIDE_RESOURCES='{"CPU": 2, "GPU": 2}')
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["loaded"] == []
    assert found["evaluations are equal"] and found["pairs are equal"]
    assert np.array_equal(*found["layers"]) and found["searched"] == 4  # three combinations, and the choice
    stages = {"layers", "start", "student", "student + ranks", "teacher 0", "teacher 1", "mining"}
    assert stages <= set(found["stages"])
