"""Imports without the collector."""

from __future__ import annotations

import gc

import pytest

from distcse.importing import importing


def test_the_collector_is_left_as_it_was_found() -> None:
    assert gc.isenabled()
    with importing():
        assert not gc.isenabled()
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
