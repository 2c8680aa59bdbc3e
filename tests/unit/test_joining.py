"""A driver with the address of a cluster that does not exist."""

from __future__ import annotations

import os
import threading
from unittest.mock import patch

import pytest
from ray.exceptions import AuthenticationError

from distcse.cluster.cluster import ClusterConfig, StartingCluster, cluster, fix_of_joining, start_ray, starting_ray
from distcse.cluster.health import check_cluster
from distcse.errors import RayConnectionError
from tests.failures import fails_with
from tests.ports import free_port


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:{port}", "(Connection refused)"),
        ("ray://127.0.0.1:{port}", "(Connection refused)"),
        ("http://127.0.0.1:8265", "HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_an_error(address: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address.format(port=free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with fails_with(RayConnectionError, f" {address}: ", reason, "RAY_ADDRESS"), cluster():
        pass


def test_an_error_of_a_background_start_is_raised_when_the_cluster_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    start_ray()
    start_ray()
    with fails_with(RayConnectionError, f" {address}: ", "(Connection refused)"), cluster():
        pass
    other = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", other)
    with fails_with(RayConnectionError, f" {other}: "), cluster():  # the first start is forgotten
        pass


class _Late(ClusterConfig):
    """Fails as Ray does where its processes don't answer in 30 s: with an `Exception` of no narrower type."""

    def connect(self) -> None:
        raise Exception("The current node timed out during startup")


def test_a_local_cluster_that_starts_too_late_is_an_error_with_the_load() -> None:
    with patch.dict(os.environ):  # a local cluster sets variables
        starting = StartingCluster(_Late(None, 1, None))
        with fails_with(RayConnectionError, "start Ray here (load ", "timed out during startup", "training.workers=0"):
            starting.wait()
        starting.end()


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_folder_whose_path_is_too_long_for_sockets_is_named(variable: str) -> None:
    with patch.dict(os.environ):
        os.environ.pop("RAY_TMPDIR", None)
        os.environ[variable] = "/tmp/" + "slurm_jobdir_" * 7
        starting = StartingCluster(ClusterConfig(None, 1, None))
        with fails_with(RayConnectionError, f" {variable}", "107", "RAY_TMPDIR=/tmp") as raised:
            starting.wait()
        starting.end()
        assert "RAY_ADDRESS" not in str(raised.value)
        (found,) = [check for check in check_cluster() if check.verdict == "fail"]
        assert variable in found.found and "RAY_TMPDIR=/tmp" in found.fix


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (RuntimeError("Version mismatch: The cluster was started with: Ray: 2.53.0"), "versions"),
        (AuthenticationError("Authentication required: Unauthenticated: Invalid or missing token"), "RAY_AUTH_TOKEN"),
        (ConnectionError("nothing answers at this address"), "start the cluster, or correct RAY_ADDRESS"),
    ],
)
def test_the_advice_fits_why_a_cluster_is_not_joined(error: Exception, fix: str) -> None:
    assert fix in fix_of_joining(error)


def test_a_run_that_fails_before_it_enters_its_cluster_ends_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(KeyError), starting_ray():
        raise KeyError("something else")
    assert not [thread for thread in threading.enumerate() if thread.name == "cluster"]
    assert start_ray() is True
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with fails_with(RayConnectionError, " nowhere: "), cluster():
        pass
