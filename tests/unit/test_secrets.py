"""No secret of the environment is stored by a run, passed to Ray, or repeated in an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.cluster.cluster import worker_environment
from distcse.errors import InvalidValueError
from distcse.events import Reporter
from tests.backends import run
from tests.failures import fails_with
from tests.jobs import make_recipe

SECRETS = {
    "HF_TOKEN": "hf_SentinelOfTheHub",
    "OPENAI_API_KEY": "sk-SentinelOfTheEndpoint",
    "DISTCSE_PASSWORD": "SentinelOfOurOwn",
    "RAY_AUTH_TOKEN": "SentinelOfRay",
    "AWS_ACCESS_KEY_ID": "SentinelOfTheBucket",
    "AWS_SECRET_ACCESS_KEY": "SentinelOfItsSecret",
    "GOOGLE_APPLICATION_CREDENTIALS": "SentinelOfTheCloud",
}


@pytest.fixture(autouse=True)
def secrets_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, "HF_HOME": "/models", "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)


def test_workers_get_settings_and_no_secrets() -> None:
    environment = worker_environment(gpus=0)
    assert environment["HF_HOME"] == "/models" and environment["TOKENIZERS_PARALLELISM"] == "false"
    assert not SECRETS.keys() & environment.keys() and not set(SECRETS.values()) & set(environment.values())


def test_a_stored_run_contains_no_secret(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.max_steps=2")
    result = run(recipe, Reporter())
    stored = [file for folder in ("runs", "cache") for file in (tmp_path / folder).rglob("*") if file.is_file()]
    assert result.directory.path / "run.json" in stored and len(stored) > 10
    for file in stored:
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in SECRETS.values()), file


@pytest.mark.parametrize(
    ("endpoint", "key"),
    [
        ({"url": "http://host/v1", "api_key_env": "sk-SentinelOfTheEndpoint"}, "api_key_env"),
        ({"url": "https://me:SentinelOfMine@host/v1"}, "url"),
        ({"url": "https://host/v1?api-key=SentinelOfMine"}, "url"),
        ({"url": "https://host/v1?SentinelOfMine"}, "url"),
        ({"url": "https://host/v1?auth=SentinelOfMine"}, "url"),
        ({"url": "me:SentinelOfMine@host/v1"}, "url"),
    ],
)
def test_a_key_in_a_recipe_is_refused_and_not_repeated(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], endpoint: dict[str, str], key: str
) -> None:
    with fails_with(InvalidValueError, f"teachers.encoders.0.endpoint.{key}") as refused:
        make_recipe(tmp_path, tiny("bert"), ["model"], sentences, f"teachers.encoders.0.endpoint={endpoint}")  # type: ignore[list-item]
    assert "Sentinel" not in str(refused.value)
