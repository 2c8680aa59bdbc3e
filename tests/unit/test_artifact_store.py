"""Atomic writes and checksums of files and folders. Locations, and writers that fail: tests/faults/test_storage.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from distcse.errors import StorageWriteError
from distcse.storage import (
    checksum,
    dump_label,
    load_checked_label,
    open_store,
    sha256,
    text_checksum,
)
from distcse.storage.atomic_files import atomic_folder, atomic_write
from tests.failures import fails_with


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write_folder(target: Path, text: str, **options: Any) -> None:
    with atomic_folder(target, **options) as temporary:
        (temporary / "deep").mkdir()
        (temporary / "deep" / "file").write_text(text)


@pytest.mark.parametrize("before", ["nothing", "folder", "file", "link", "dangling link"])
def test_a_folder_replaces_what_was_there_and_nothing_else_remains(tmp_path: Path, before: str) -> None:
    target, elsewhere = tmp_path / "missing" / "target", tmp_path / "elsewhere"
    write_folder(elsewhere, "kept")
    if before != "nothing":
        target.parent.mkdir()
    if before == "folder":
        write_folder(target, "before")
    elif before == "file":
        target.write_text("x")
    elif before != "nothing":
        target.symlink_to(elsewhere if before == "link" else tmp_path / "nowhere")
    for text, options, expected in (
        ("one", {}, "one"),
        ("two", {"is_complete": lambda: True}, "one"),  # a complete folder is kept
        ("three", {"is_complete": lambda: False}, "three"),
    ):
        write_folder(target, text, **options)
        assert not target.is_symlink() and (target / "deep" / "file").read_text() == expected
    assert (names(target.parent), names(target), names(tmp_path)) == (["target"], ["deep"], ["elsewhere", "missing"])
    assert (elsewhere / "deep" / "file").read_text() == "kept"


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_decides_for_files_of_libraries_and_copies_too(tmp_path: Path, umask: int) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "file").write_text("x")
    for path, mode in ((source / "deep" / "file", 0o400), (source, 0o500)):
        path.chmod(mode)
    earlier = os.umask(umask)
    try:
        with atomic_folder(tmp_path / "target") as temporary:
            shutil.copytree(source, temporary, dirs_exist_ok=True)
            save_file({"x": np.zeros(1)}, temporary / "model.safetensors")
        with atomic_write(tmp_path / "file.safetensors") as file:
            save_file({"x": np.zeros(1)}, file)
    finally:
        os.umask(earlier)
    written = [tmp_path / "file.safetensors", tmp_path / "target", *(tmp_path / "target").rglob("*")]
    assert len(written) == 5
    modes = {path.name: path.stat().st_mode & 0o777 for path in written}
    assert modes == {path.name: (0o777 if path.is_dir() else 0o666) & ~umask for path in written}


def test_a_file_is_not_written_into_a_deleted_store(tmp_path: Path) -> None:
    with fails_with(StorageWriteError, str(tmp_path / "run")):
        open_store(tmp_path / "run").write_text("a/recipe.yaml", "one")
    assert not (tmp_path / "run").exists()


def test_a_label_names_the_checksum_of_its_file(tmp_path: Path) -> None:
    file, label = tmp_path / "x.npy", tmp_path / "x.json"
    file.write_text("content")
    label.write_text(dump_label(file, rows=3))
    assert checksum(file) == text_checksum("content")
    assert load_checked_label(label, file) == {"rows": 3, "blake2b": checksum(file)}
    file.write_text("other")
    assert load_checked_label(label, file) is None
    file.unlink()
    assert load_checked_label(label, file) is None
    for content in ("", "[]", "3", '{"rows": 3}'):
        label.write_text(content)
        assert load_checked_label(label, file) is None


def test_checksums_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """Existing runs, tables and checkpoints are verified by them."""
    assert text_checksum("distcse") == "6b692010e6c9b24c05132b60c780cb6b"
    assert sha256([b"dist", b"cse"]) == sha256([b"distcse"])
