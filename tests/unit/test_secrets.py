"""No secret of the environment in what a run stores, hands to Ray, or says of a mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.errors import RecipeError
from distcse.events import Reporter
from distcse.experiments.distillation.run import run
from distcse.ray_backend.cluster import worker_environment
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
def in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, "HF_HOME": "/models", "TOKENIZERS_PARALLELISM": "false"}.items():
        monkeypatch.setenv(name, value)


def test_workers_are_given_settings_and_no_secrets() -> None:
    given = worker_environment(gpus=0)
    assert given["HF_HOME"] == "/models" and given["TOKENIZERS_PARALLELISM"] == "false"
    assert not SECRETS.keys() & given.keys() and not set(SECRETS.values()) & set(given.values())


def test_a_stored_run_holds_none(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.max_steps=2")
    done = run(recipe, Reporter())
    stored = [file for folder in ("runs", "cache") for file in (tmp_path / folder).rglob("*") if file.is_file()]
    assert done.directory.path / "run.json" in stored and len(stored) > 10
    for file in stored:
        content = file.read_bytes()
        assert not any(secret.encode() in content for secret in SECRETS.values()), file


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ({"url": "http://host/v1", "api_key_env": "sk-SentinelOfTheEndpoint"}, "the key itself belongs in no recipe"),
        ({"url": "https://me:SentinelOfMine@host/v1"}, "url holds a user's name or password"),
    ],
)
def test_a_key_in_a_recipe_is_refused_and_not_repeated(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], endpoint: dict[str, str], told: str
) -> None:
    with pytest.raises(RecipeError, match=told) as refused:
        make_recipe(tmp_path, tiny("bert"), ["model"], sentences, f"teachers.encoders.0.endpoint={endpoint}")  # type: ignore[list-item]
    assert "Sentinel" not in str(refused.value)
