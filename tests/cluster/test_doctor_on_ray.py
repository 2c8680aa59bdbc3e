"""`distcse doctor` on a real cluster: versions of the nodes, and their access to the run's folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcse.cluster import health

pytestmark = pytest.mark.cluster


def test_nodes_are_checked(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    (found,) = health.check_cluster({"storage.runs": tmp_path, "storage.cache": tmp_path / "not created yet"})
    assert found.verdict == "ok" and "1 nodes, 6 CPUs" in found.found
    assert ray.is_initialized()  # an existing connection is kept
