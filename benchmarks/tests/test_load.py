"""Trials that request lists from shared servers at full speed, and runs with a random fault on several nodes.

`benchmarks/load.py` and `benchmarks/soak.py` run them at full size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.load import MIB, TOLERANCE, Load, run_load
from benchmarks.soak import ROWS, Soak
from tests.kills import Nodes
from tests.wikipedia import wiki_sentences

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_trials_that_share_servers_get_correct_lists_without_growing_memory(cluster: None, tmp_path: Path) -> None:
    load = Load(rows=20_000, width=64, teachers=2, trials=3, requests=600, batch=32, block_steps=16, seconds=300)
    result = run_load(load, tmp_path)
    assert len(result.latencies) == 600 and (result.latencies > 0).all()
    assert sum(trial.compared for trial in result.trials) == 300
    assert max(trial.largest_difference for trial in result.trials) <= TOLERANCE
    assert result.deepest_of_a_trial == 2 and 2 <= result.deepest_of_a_teacher <= 2 * load.trials
    processes = [name for name in result.memory if name.startswith(("server ", "trial "))]
    assert len(processes) == load.teachers + load.trials
    assert {"driver", "raylet", "object store"} <= set(result.memory)
    # Each server sent 300 answers of 64 KiB, each trial received 200: a leak of half of them would exceed the limit.
    for name in processes:
        assert result.memory[name]["private"].growth() < 5 * MIB, name


# -- soak ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Soak]:
    folder = tmp_path_factory.mktemp("soak")
    with Nodes(folder) as cluster_nodes:
        yield Soak(folder, cluster_nodes, wiki_sentences(data, ROWS))


@pytest.mark.parametrize(("seed", "kind"), [(10, "node"), (11, "driver")])
def test_a_disturbed_run_reaches_the_same_weights(soak: Soak, seed: int, kind: str) -> None:
    played = soak.play(seed, kind)
    assert played.survived and played.restarts == 1, played.line
