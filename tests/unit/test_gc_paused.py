"""Imports with a paused garbage collector."""

from __future__ import annotations

import gc

import pytest

from distcse.devices.process import gc_paused


def test_the_collectors_state_is_restored() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), gc_paused():
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
