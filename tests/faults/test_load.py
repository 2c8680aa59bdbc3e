"""Trials that request lists from shared servers at full speed, and runs with a random fault on several nodes.

`benchmarks/load.py` and `benchmarks/soak.py` run them at full size.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load import MIB, TOLERANCE, Load, RequestTimes, TrackedServer, deepest, run_load
from benchmarks.soak import ROWS, Soak
from distcse.cluster.heartbeat import CONCURRENCY
from distcse.cluster.teacher_servers import RemoteTeacherClient, TeacherServer, server_of
from distcse.errors import TeacherOutputError
from tests.kills import Nodes
from tests.wikipedia import wiki_sentences

pytestmark = pytest.mark.cluster


@pytest.mark.slow
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


class SlowTeacher:
    """A teacher that takes 20 ms, and fails for row 7."""

    def similarities(self, columns: np.ndarray, rows: slice) -> np.ndarray:
        time.sleep(0.02)
        if columns[0, 0] == 7:
            raise TeacherOutputError("no row 7")
        return columns[:, None].astype(np.float32)


def test_requests_to_a_slow_server_wait_for_earlier_answers(cluster: None) -> None:
    import ray

    server, times = ray.remote(num_cpus=0, **CONCURRENCY)(TeacherServer).remote(SlowTeacher), RequestTimes()
    client = RemoteTeacherClient(TrackedServer(server, times))
    answers = [client.request(np.array([[row]]), slice(None)) for row in range(30)]
    with pytest.raises(TeacherOutputError, match="no row 7"):  # Ray raises a subclass of RayTaskError and of the cause
        answers.pop(7).result()
    assert [answer.result().item() for answer in answers] == [row for row in range(30) if row != 7]
    assert deepest(np.array(times.times).T) == 2
    ray.kill(server)


def test_workers_share_a_pool_evenly_and_trials_about_evenly() -> None:
    pool = ["a", "b", "c"]
    assert Counter(server_of(pool, "run", worker) for worker in range(6)) == {"a": 2, "b": 2, "c": 2}
    trials = Counter(server_of(pool, f"f3b0c_{number:05d}", 0) for number in range(60))
    assert min(trials.values()) >= 10


# -- soak ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Iterator[Soak]:
    folder = tmp_path_factory.mktemp("soak")
    with Nodes(folder) as cluster_nodes:
        yield Soak(folder, cluster_nodes, wiki_sentences(data, ROWS))


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kind"), [(10, "node"), (11, "driver")])
def test_a_disturbed_run_reaches_the_same_weights(soak: Soak, seed: int, kind: str) -> None:
    played = soak.play(seed, kind)
    assert played.survived and played.restarts == 1, played.line
