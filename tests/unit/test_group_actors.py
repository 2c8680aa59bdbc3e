"""The actors of a mutual distillation's groups, without Ray."""

from __future__ import annotations

import socket

import pytest

from distcse.ray_backend.group_actors import serve_store


def test_the_port_of_a_process_group_stays_bound_until_all_have_joined() -> None:
    """Another process could take a port that is only asked for, before the group binds it."""
    store = serve_store("127.0.0.1", workers=2)
    with socket.socket() as taker, pytest.raises(OSError, match="in use"):
        taker.bind(("", store.port))
    store.set("key", "value")
    assert store.get("key") == b"value"
