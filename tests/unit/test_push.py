"""To the hub and back, over HTTP: what is uploaded, by whom, and the environment variables of the ecosystem."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from distcse.errors import EncoderError
from distcse.models import Encoder
from distcse.push import main
from distcse.recipe import Recipe
from distcse.running import Run, run
from distcse.sharing import _without, prepare
from tests.conftest import ROOT
from tests.hub import TOKEN, standing_in


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> Run:
    from tests.jobs import make_recipe

    folder = tmp_path_factory.mktemp("push")
    recipe: Recipe = make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences, "training.max_steps=2")
    return run(recipe, listen=lambda event: None)


def test_nothing_of_this_machine_is_given_away(done: Run, tmp_path: Path) -> None:
    parcel = prepare(done.directory, tmp_path / "out", "mit")
    assert {"config.json", "model.safetensors", "modules.json", "README.md", "distcse/recipe.yaml"} <= set(parcel.files)
    for name in parcel.files:
        if not name.endswith(".safetensors"):
            told = (parcel.folder / name).read_text(encoding="utf-8")
            assert "/tmp/" not in told and str(done.directory.parent) not in told, name
    head = (parcel.folder / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(head)["license"] == "mit" and parcel.remarks == []
    assert "license" not in (done.model / "README.md").read_text().split("---\n")[1], (
        "the run's own card stays as it was"
    )
    assert prepare(done.model, tmp_path / "again").remarks[0].startswith("the card names no licence; --licence")


def test_only_whole_paths_are_taken_out() -> None:
    card = "at /data, of /data/texts.txt:\nprinceton-nlp/datasets-for-simcse https://huggingface.co/datasets/x /data-2"
    assert _without(["/data/texts.txt", "/data"], card) == (
        "at data, of texts.txt:\nprinceton-nlp/datasets-for-simcse https://huggingface.co/datasets/x /data-2"
    )


def test_a_run_of_groups_or_one_that_goes_on_is_told(done: Run, tmp_path: Path) -> None:
    shutil.copy(done.directory / "recipe.yaml", tmp_path)
    with pytest.raises(EncoderError, match="its run has not come to an end; wait for it, or --resume it"):
        prepare(tmp_path, tmp_path / "out")
    shutil.copytree(done.model, tmp_path / "models" / "one" / "bi")
    with pytest.raises(EncoderError, match="holds several models; name one of them: models/one/bi"):
        prepare(tmp_path, tmp_path / "out")


def test_a_dry_run_asks_no_hub(done: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(done.directory), "--to", "me/mine", "--dry-run"]) == 0
    told = capsys.readouterr()
    assert "to me/mine:" in told.out and "  model.safetensors" in told.out and "--licence" in told.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{run}", "--to", "mine"], "--to mine names no model on the hub; write USER/NAME"),
        (["{run}/checkpoints", "--to", "me/mine"], "holds no model"),
        (["{run}", "--to", "me/mine"], "HF_HUB_OFFLINE=1 forbids it"),  # the tests' own setting
    ],
)
def test_mistakes(arguments: list[str], told: str, done: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([argument.format(run=done.directory) for argument in arguments]) == 1
    assert told in capsys.readouterr().err


def ask(code: list[str], home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, *code],
        env={**kept, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_pushed_and_loaded_again(done: Run, tmp_path: Path, sentences: list[str]) -> None:
    push = ["-m", "distcse.push", str(done.directory), "--to", "me/mine", "--private", "--licence", "mit"]
    vectors = tmp_path / "vectors.npy"
    load = [
        "-c",
        "import sys, numpy, distcse; "
        f"numpy.save({str(vectors)!r}, distcse.Encoder.load('me/mine').encode({sentences[:4]!r}))",
    ]
    with standing_in() as hub:
        refused = ask(push, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
        assert (
            refused.returncode == 1
            and "the hub did not take me/mine" in refused.stderr
            and "HF_TOKEN" in refused.stderr
        )
        pushed = ask(push, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert pushed.returncode == 0, pushed.stderr
        assert pushed.stdout == f"model   {hub.url}/me/mine\n" and hub.private["me/mine"]
        assert hub.models["me/mine"]["model.safetensors"] == (done.model / "model.safetensors").read_bytes()
        hub.models["me/mine"]["pytorch_model.bin"] = b"a pickle"
        stranger = ask(load, tmp_path, HF_ENDPOINT=hub.url)
        assert stranger.returncode == 1 and "a private model wants HF_TOKEN" in stranger.stderr
        loaded = ask(load, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert loaded.returncode == 0, loaded.stderr
        assert not [path for path in hub.asked if path.endswith(".bin")], "pickles are not even fetched"
    expected = Encoder.load(done.model).encode(sentences[:4])
    assert np.array_equal(np.load(vectors), expected)
    assert any((tmp_path / "hub").rglob("model.safetensors")), "HF_HOME holds the cache"
    vectors.unlink()
    offline = ask(load, tmp_path, HF_HUB_OFFLINE="1")  # the stand-in is gone
    assert offline.returncode == 0, offline.stderr
    assert np.array_equal(np.load(vectors), expected)
    nothing = ask(load, tmp_path / "hub", HF_HUB_OFFLINE="1")
    assert nothing.returncode == 1 and "is no folder here and cannot be had from the hub" in nothing.stderr
