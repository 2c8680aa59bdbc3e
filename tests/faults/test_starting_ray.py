"""Ray that starts in the background."""

from __future__ import annotations

import sys

import pytest

from tests.commands import run_command


@pytest.mark.slow
def test_a_cluster_started_in_the_background_has_the_requested_cpus_and_leaves_signals_alone() -> None:
    script = """
import os, signal, sys, threading, time
import psutil
from distcse.cluster.cluster import start_ray, cluster
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
signal.signal(signal.SIGTERM, lambda number, frame: print("heard"))
start_ray(cpus=1)
while "ray" not in sys.modules or not getattr(sys.modules["ray"], "is_initialized", bool)():
    time.sleep(0.1)
time.sleep(1)
os.kill(os.getpid(), signal.SIGTERM)
with cluster(cpus=1):
    import ray
    print(ray.cluster_resources()["CPU"])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
start_ray(cpus=1)
with cluster(cpus=2):
    print(ray.cluster_resources()["CPU"])
    start_ray(cpus=3)
    with cluster(cpus=3):
        print(ray.cluster_resources()["CPU"])
print(len(psutil.Process().children()), [t.name for t in threading.enumerate() if t.name == "cluster"])
start_ray(cpus=1)
raise SystemExit(7)
"""
    done = run_command([sys.executable, "-c", script])
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == ["heard", "1.0", "heard", "2.0", "2.0", "0 []"]
    assert "SIGTERM" not in done.stderr
