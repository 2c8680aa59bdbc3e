"""A driver that is told of a cluster which is not there."""

from __future__ import annotations

import threading

import pytest

from distcse.errors import RunError
from distcse.ray_backend.cluster import cluster, starting_ray, start_ray
from tests.ports import free_port


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:{port}", "nobody answers there (Connection refused)"),
        ("ray://127.0.0.1:{port}", "nobody answers there (Connection refused)"),
        ("http://127.0.0.1:8265", "that is where jobs are submitted; a driver joins HOST:PORT"),
    ],
)
def test_an_address_that_no_cluster_has_is_one_clear_error(
    address: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address.format(port=free_port())
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError) as refused, cluster():
        pass
    assert str(refused.value).startswith(f"cannot join the Ray cluster at {address}: {told}")
    assert "Check RAY_ADDRESS" in str(refused.value)


def test_what_went_wrong_ahead_is_told_where_the_cluster_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    start_ray()
    start_ray()
    with pytest.raises(RunError, match=f"cannot join the Ray cluster at {address}: nobody answers there"), cluster():
        pass
    other = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", other)
    with pytest.raises(RunError, match=f"at {other}"), cluster():  # the first is over
        pass


def test_a_run_that_fails_before_its_cluster_is_entered_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    with pytest.raises(KeyError), starting_ray(enabled=True):
        raise KeyError("something else")
    assert not [thread for thread in threading.enumerate() if thread.name == "cluster"]
    with starting_ray(enabled=False):
        assert start_ray() is True
        monkeypatch.setenv("RAY_ADDRESS", "nowhere")
        with pytest.raises(RunError, match="at nowhere"), cluster():
            pass
