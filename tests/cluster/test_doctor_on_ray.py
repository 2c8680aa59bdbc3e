"""`distcse.doctor` on a real cluster: nodes asked for their versions and for the run's folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcse.health import ray_cluster

pytestmark = pytest.mark.cluster


def test_nodes_say_what_they_have(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    (found,) = ray_cluster.cluster({"storage.runs": tmp_path, "storage.cache": tmp_path / "not made yet"})
    assert found.verdict == "ok" and "1 nodes, 6 CPUs" in found.found
    assert ray.is_initialized()  # whoever had joined before stays
