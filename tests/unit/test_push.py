"""Uploads to a hub over HTTP and downloads from it: which files, as whom, and the ecosystem's environment variables."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from distcse.api import Run, run
from distcse.compat import fix_of_hub_error
from distcse.errors import DistcseError, HubUploadError, ModelNotFoundError
from distcse.hub import prepare_upload
from distcse.models import Encoder
from tests.commands import command
from tests.conftest import ROOT
from tests.endpoints import Reply, open_endpoint
from tests.hub import TOKEN, run_hub
from tests.jobs import make_recipe
from tests.models import change_json
from tests.ports import free_port

main = command("push")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> Run:
    folder = tmp_path_factory.mktemp("push")
    recipe = make_recipe(folder, tiny("bert"), [tiny("minilm")], sentences[:64], "training.max_steps=2")
    return run(recipe, listen=lambda event: None)


def test_paths_of_this_machine_are_removed(done: Run, tmp_path: Path) -> None:
    bundle = prepare_upload(done.directory, tmp_path / "out", "mit")
    assert {"config.json", "model.safetensors", "modules.json", "README.md", "distcse/recipe.yaml"} <= set(bundle.files)
    for name in bundle.files:
        if not name.endswith(".safetensors"):
            text = (tmp_path / "out" / name).read_text(encoding="utf-8")
            assert "/tmp/" not in text and str(done.directory.parent) not in text, name
    head = (tmp_path / "out" / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(head)["license"] == "mit" and bundle.remarks == []
    assert "license" not in (done.model / "README.md").read_text().split("---\n")[1], "the run's own card is unchanged"
    assert "--license ID" in prepare_upload(done.model, tmp_path / "again").remarks[0]


def test_no_private_name_is_uploaded(done: Run, tmp_path: Path) -> None:
    private = {
        "storage.runs": "s3://secretbucket",
        "storage.cache": "s3://secretbucket/cache",
        "corpus.path": "/home/secretuser/" + "a long name " * 12 + "é.txt",
        "student.backbone": "/home/secretuser/\u00fc/model",
        "loggers.mlflow": {"uri": "http://secrethost:5000", "experiment": "x"},
        "loggers.wandb": None,
        "teachers.encoders": [
            {"backbone": "x", "endpoint": {"url": "http://secrethost/v1"}, "kwargs": ["--in=s3://secretbucket"]}
        ],
    }
    model = tmp_path / "model"
    shutil.copytree(done.model, model)
    (model / "distcse" / "recipe.yaml").write_text(yaml.safe_dump(private, width=60))
    (model / "README.md").write_text(f"---\na: 1\n---\nof {private['corpus.path']}, s3://secretbucket/runs/x\n")
    for name in ("config.json", "tokenizer_config.json"):
        change_json(model / name, _name_or_path=private["student.backbone"])
    bundle = prepare_upload(model, tmp_path / "out")
    for name in bundle.files:
        assert b"secret" not in (tmp_path / "out" / name).read_bytes(), name
    shared = yaml.safe_load((tmp_path / "out" / "distcse" / "recipe.yaml").read_text())
    assert shared["storage.runs"] == "s3" and shared["storage.cache"] == "cache"
    assert shared["student.backbone"] == "ü/model" and shared["teachers.encoders"][0]["backbone"] == "x"


def test_a_dry_run_contacts_no_hub(done: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(done.directory), "--to", "me/mine", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "to me/mine:" in shown.out and "  model.safetensors" in shown.out and "--license" in shown.err


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (["{run}", "--to", "mine"], HubUploadError, "--to mine"),
        (["{run}", "--to", "https://huggingface.co/datasets/me/mine"], HubUploadError, "page of a data set"),
        (["{run}/checkpoints", "--to", "me/mine"], ModelNotFoundError, "/checkpoints"),
        (["{run}", "--to", "me/mine"], HubUploadError, "HF_HUB_OFFLINE"),  # the tests set it
    ],
)
def test_errors_have_a_code(
    arguments: list[str], error: type[DistcseError], named: str, done: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(run=done.directory) for argument in arguments]) == 1
    shown = capsys.readouterr().err
    assert f"[{error.code}]" in shown and named in shown


@pytest.mark.parametrize(("status", "fix"), [(401, "HF_TOKEN"), (404, "HF_TOKEN"), (503, "later"), (None, "network")])
def test_the_advice_fits_why_the_hub_fails(status: int | None, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with open_endpoint(lambda body, headers: Reply("{}", status or 200)) as url, pytest.raises(Exception) as raised:
        address = f"http://127.0.0.1:{free_port()}" if status is None else url.removesuffix("/v1")
        HfApi(endpoint=address).model_info("me/mine", timeout=5)  # raises errors of many types
    found = fix_of_hub_error(raised.value, "write a folder")
    assert fix in found and ("write a folder" in found) == (status is None)


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "HF_HOME"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (ConnectionError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate"), "SSL_CERT_FILE"),
        (LocalTokenNotFoundError("token required"), "HF_TOKEN"),
        (ValueError("a malformed file"), ""),
    ],
)
def test_the_advice_fits_an_error_s_cause(error: Exception, fix: str) -> None:
    wrapped = RuntimeError("cannot be loaded")
    wrapped.__cause__ = error
    found = fix_of_hub_error(wrapped, "write a folder")
    assert fix in found and bool(found) == bool(fix)


def run_python(code: list[str], home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment_without_hf = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, *code],
        env={**environment_without_hf, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_a_pushed_model_can_be_loaded(done: Run, tmp_path: Path, sentences: list[str]) -> None:
    push = ["-m", "distcse", "push", str(done.directory), "--to", "me/mine", "--private", "--licence", "mit"]
    vectors = tmp_path / "vectors.npy"
    encode = f"distcse.Encoder.load('me/mine').encode({sentences[:4]!r})"
    load = ["-c", f"import numpy, distcse; numpy.save({str(vectors)!r}, {encode})"]
    with run_hub() as hub:
        refused = run_python(push, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN="hf_wrong")
        assert refused.returncode == 1
        assert all(part in refused.stderr for part in (f"[{HubUploadError.code}]", "me/mine", "HF_TOKEN"))
        pushed = run_python(push, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert pushed.returncode == 0, pushed.stderr
        assert pushed.stdout == f"model   {hub.url}/me/mine\n" and hub.private["me/mine"]
        assert hub.models["me/mine"]["model.safetensors"] == (done.model / "model.safetensors").read_bytes()
        hub.models["me/mine"]["pytorch_model.bin"] = b"a pickle"
        stranger = run_python(load, tmp_path, HF_ENDPOINT=hub.url)
        assert stranger.returncode == 1 and "ModelNotFoundError" in stranger.stderr and "HF_TOKEN" in stranger.stderr
        loaded = run_python(load, tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
        assert loaded.returncode == 0, loaded.stderr
        assert not [path for path in hub.requested_paths if path.endswith(".bin")], "pickles are not downloaded"
    expected = Encoder.load(done.model).encode(sentences[:4])
    assert np.array_equal(np.load(vectors), expected)
    assert any((tmp_path / "hub").rglob("model.safetensors")), "the cache is in HF_HOME"
    assert any("license: mit" in file.read_text() for file in (tmp_path / "hub").rglob("README.md"))
    vectors.unlink()
    offline = run_python(load, tmp_path, HF_HUB_OFFLINE="1")  # the hub has stopped
    assert offline.returncode == 0, offline.stderr
    assert np.array_equal(np.load(vectors), expected)
    nothing = run_python(load, tmp_path / "hub", HF_HUB_OFFLINE="1")
    assert nothing.returncode == 1 and "ModelNotFoundError" in nothing.stderr and "me/mine" in nothing.stderr
