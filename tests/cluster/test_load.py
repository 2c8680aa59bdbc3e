"""Trials that ask shared servers as fast as they can: every answer right, no queue that grows (`benchmarks/load.py`, small)."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load import CLOSE, Clock, Load, deepest, measured
from benchmarks.memory import MIB
from distcse.errors import TeacherError
from distcse.teachers.heartbeat import CONCURRENCY
from distcse.teachers.servers import RemoteTeacherClient, TeacherServer, server_of

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_trials_that_share_servers_get_their_lists_and_nothing_grows(cluster: None, tmp_path: Path) -> None:
    load = Load(rows=20_000, width=64, teachers=2, trials=3, requests=600, batch=32, block_steps=16, seconds=300)
    found = measured(load, tmp_path)
    assert len(found.latencies) == 600 and (found.latencies > 0).all()
    assert sum(trial.compared for trial in found.asked) == 300
    assert max(trial.largest_difference for trial in found.asked) <= CLOSE
    assert found.deepest_of_a_trial == 2 and 2 <= found.deepest_of_a_teacher <= 2 * load.trials
    report = found.report()
    asking = [name for name in report["memory"] if name.startswith(("server ", "trial "))]
    assert len(asking) == load.teachers + load.trials and {"driver", "raylet", "object store"} <= set(report["memory"])
    # 300 answers of 64 KiB passed every server, 200 every trial: kept, half of them would be seen.
    for name in asking:
        assert found.courses[name]["private"].growth() < 5 * MIB, report["memory"][name]


class Slow:
    """A teacher that takes its time and does not know row 7."""

    def similarities(self, columns: np.ndarray, rows: slice) -> np.ndarray:
        time.sleep(0.02)
        if columns[0, 0] == 7:
            raise TeacherError("no row 7")
        return columns[:, None].astype(np.float32)


def test_who_asks_faster_than_a_server_answers_has_to_wait(cluster: None) -> None:
    import ray

    server, clock = ray.remote(num_cpus=0, **CONCURRENCY)(TeacherServer).remote(Slow), Clock()
    source = RemoteTeacherClient(server, clock.track)
    answers = [source.request(np.array([[row]]), slice(None)) for row in range(30)]
    with pytest.raises(TeacherError, match="no row 7"):
        answers.pop(7).result()
    assert [answer.result().item() for answer in answers] == [row for row in range(30) if row != 7]
    assert deepest(np.array(clock.times).T) == 2
    ray.kill(server)


def test_a_pool_is_shared_evenly_by_workers_and_about_so_by_trials() -> None:
    pool = ["a", "b", "c"]
    assert Counter(server_of(pool, "run", worker) for worker in range(6)) == {"a": 2, "b": 2, "c": 2}
    trials = Counter(server_of(pool, f"f3b0c_{number:05d}", 0) for number in range(60))
    assert min(trials.values()) >= 10
