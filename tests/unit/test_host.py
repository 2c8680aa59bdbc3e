"""Settings of this machine's threads."""

from __future__ import annotations

import os

import pytest

from distcse import cli


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "2000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_a_command_limits_spinning_unless_the_user_has(
    given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "quickstart", "--print-recipe"]) == 0
    assert {name: os.environ[name] for name in names if name in os.environ} == expected
