"""Open the models to evaluate (a model folder, a run directory, a name on the hub), and make ensembles of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.devices.device import auto_precision, speed_of
from distcse.errors import EvaluationOptionError, nearest
from distcse.evaluation.contamination import Contamination
from distcse.evaluation.evaluation import Candidate, ModelResults, measure_model
from distcse.evaluation.models import (
    Ensemble,
    Model,
    PairScores,
    Progress,
    RankSpaceModel,
    RecordedScores,
    VectorModel,
)
from distcse.evaluation.results import ModelInfo, group_runs, number_runs
from distcse.evaluation.suites import Tasks
from distcse.events import Listener, Reporter
from distcse.models import CrossEncoder, Encoder, StaticEncoder, is_cross_encoder, is_static, resolve_model
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.st_format import default_pooling
from distcse.rank_space import RankSpaceEncoder, is_rank_space
from distcse.recipe.encoders import SearchRole
from distcse.recipe.names import hub_id
from distcse.storage import find_model, is_uri

_ALL = "all"


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading and running models.

    Args:
        pooling: Pooling of folders that do not store theirs; a stored pooling takes precedence.
        max_length: Maximum number of tokens per sentence; None takes the folder's.
        device: Device to run on, such as `cpu` or `cuda:1`.
        precision: `fp32`, or `bf16` / `fp16` autocast; `auto` is bf16 where the device is fast at it, else fp32.
        trust_remote_code: Run Python code from the model's folder.
        prompt: Text put before every sentence, or a template with `{sentence}` in it; empty takes the folder's.
            Cross-encoders ignore it.
        prompts: Prompts of single models by their names in tables, instead of `prompt`; those of several runs share their
            model's.
        role_prompts: By role, the prompts of single models, and under "" that of the others; instead of those of all texts.
    """

    pooling: str | None = None
    max_length: int | None = None
    device: str = "cpu"
    precision: str = "auto"
    trust_remote_code: bool = False
    prompt: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    role_prompts: Mapping[SearchRole, Mapping[str, str]] = field(default_factory=dict)

    @property
    def resolved_precision(self) -> str:
        """`precision`, with `auto` replaced by the precision that the device is fast at."""
        return auto_precision([speed_of(self.device)]) if self.precision == "auto" else self.precision

    def prompt_of(self, name: str) -> str:
        """Return the prompt of a model by its name in tables."""
        (model,) = group_runs([name])
        return self.prompts.get(name, self.prompts.get(model, self.prompt))

    def role_prompts_of(self, name: str) -> dict[SearchRole, str]:
        """Return the prompts of the roles of a model by its name in tables."""
        (model,) = group_runs([name])
        found: dict[SearchRole, str] = {}
        for role, prompts in self.role_prompts.items():
            for key in filter(prompts.__contains__, ("", model, name)):
                found[role] = prompts[key]
        return found


def parse_prompts(typed: Sequence[str], names: Sequence[str], option: str = "--prompt") -> dict[str, str]:
    """Parse `NAME=TEXT`, for one model, and `TEXT`, for all others, under the name ""."""
    known = {*group_runs(names)} | {*names}
    found: dict[str, str] = {}
    for text in typed:
        name, equals, prompt = text.partition("=")
        name, prompt = (name, prompt) if equals else ("", text)
        if name and name not in known:
            raise EvaluationOptionError(
                f"{option} {text!r:.60}: there is no model {name!r}{nearest(name, sorted(known))}; the models are "
                f"{', '.join(sorted(known))}. Write NAME=TEXT, or for all models TEXT, or =TEXT if it contains an equals sign"
            )
        if name in found:
            raise EvaluationOptionError(f"{option} gives two prompts for {name or 'all models'}; keep one")
        found[name] = prompt
    return found


def parse_models(models: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=MODEL` or `MODEL` into a mapping from names to models.

    Without a NAME, the folder's name is taken; for a folder called `model`, its parent's. Several models with the same
    explicit NAME are its runs: `NAME, run 1`, `NAME, run 2`, …
    """
    found: dict[str, list[str]] = {}
    for text in models:
        name, equals, path = text.partition("=")
        if not path if equals else not name:
            raise EvaluationOptionError(f"{text!r} has no model or an empty name; write MODEL or NAME=MODEL")
        is_unnamed = not equals or os.path.isdir(text) or is_uri(name)  # runs/lr=3e-5/model is a path
        path = _without_page(text if is_unnamed else path)
        if is_unnamed:
            name, equals = _default_name(path), ""
        others = found.setdefault(name, [])
        if path in others or (others and not equals):
            raise EvaluationOptionError(f"two models have the name {name}; give one another name: NAME={path}")
        others.append(path)
    return number_runs(found)


def _without_page(model: str) -> str:
    """Return the id in the address of a model's page on the hub; other names unchanged."""
    try:
        return hub_id(model)
    except ValueError as error:
        raise EvaluationOptionError(str(error)) from None


def open_candidate(name: str, source: str, options: LoadOptions, on_progress: Progress | None = None) -> Candidate:
    """Load a model to evaluate; a run directory represents its student."""
    folder, prompt = resolve_model(find_model(source), options.trust_remote_code), options.prompt_of(name)
    kind = "static model" if is_static(folder) else "cross-encoder" if is_cross_encoder(folder) else ""
    if kind and prompt != options.prompt:
        raise EvaluationOptionError(
            f"--prompt {name}=…: {source} is a {kind}, which reads texts without a prompt; remove it"
        )
    contamination = Contamination.read(folder)
    if kind == "static model":
        static = StaticEncoder.load(folder)
        return replace(make_candidate(name, source, static, contamination, "fp32", on_progress), folder=folder)
    model: Encoder | RankSpaceEncoder | CrossEncoder
    if kind:
        model = CrossEncoder.load(folder, options.max_length, options.trust_remote_code)
    elif is_rank_space(folder):
        model = _load_rank_space(folder, source, options, prompt)
    else:
        model = Encoder.load(
            folder,
            pooling=default_pooling(folder, options.pooling),
            max_length=options.max_length,
            trust_remote_code=options.trust_remote_code,
            prompt=prompt,
            prompts=options.role_prompts_of(name),
        )
    model.to(options.device)
    candidate = make_candidate(name, source, model, contamination, options.resolved_precision, on_progress)
    encoder: Encoder | CrossEncoder = model.encoder if isinstance(model, RankSpaceEncoder) else model
    use_mkldnn_linear(encoder, options.resolved_precision)
    return replace(candidate, folder=folder)


def make_candidate(
    name: str,
    source: str,
    model: Encoder | RankSpaceEncoder | CrossEncoder | StaticEncoder,
    contamination: Contamination,
    precision: str = "fp32",
    on_progress: Progress | None = None,
) -> Candidate:
    """Wrap a loaded model as a candidate; one with references scores pairs by cosine and by rank."""
    if isinstance(model, StaticEncoder):
        info = ModelInfo(
            name,
            source,
            "static",
            "mean",
            model.max_length,
            model.num_parameters,
            dimensions=model.dimension,
            size_bytes=model.size_bytes,
        )
        return Candidate(info, VectorModel(_with_total(model, on_progress)), contamination)
    encoder: Encoder | CrossEncoder = model.encoder if isinstance(model, RankSpaceEncoder) else model
    scorer: Model
    if isinstance(encoder, CrossEncoder):
        kind, pooling, dimensions = "cross-encoder", "pair", 0
        scorer = PairScores(encoder, on_progress, precision)
    else:
        kind, pooling, dimensions = "bi-encoder", encoder.pooling, encoder.dimension
        scorer = VectorModel.of(encoder, precision, on_progress)
    if isinstance(model, RankSpaceEncoder):
        kind = f"rank space, λ = {model.weight:g}"
        scorer = RankSpaceModel(model, precision, on_progress)
    weights = list(encoder.parameters())
    info = ModelInfo(
        name,
        source,
        kind,
        pooling,
        encoder.max_length,
        sum(tensor.numel() for tensor in weights),
        dimensions=dimensions,
        size_bytes=sum(tensor.numel() * tensor.element_size() for tensor in weights),
    )
    return Candidate(info, scorer, contamination, tokenizer=encoder.tokenizer)


def _load_rank_space(folder: Path, source: str, options: LoadOptions, prompt: str) -> RankSpaceEncoder:
    """Load a rank space, whose reference vectors depend on the maximum length and prompt stored in its folder."""
    ranker = RankSpaceEncoder.load(folder, options.trust_remote_code)
    saved = ranker.encoder.max_length, ranker.encoder.prompt
    if (options.max_length or saved[0], prompt or saved[1]) != saved:
        raise EvaluationOptionError(
            f"{source}: the rank space's references were encoded with max_length {saved[0]} and prompt {saved[1]!r}; "
            "sentences must be encoded the same way. Leave out --max-length and --prompt, or build another rank space"
        )
    return ranker


def _with_total(model: StaticEncoder, on_progress: Progress | None) -> Callable[[Sequence[str]], NDArray[np.float32]]:
    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = model.encode(texts)
        if on_progress is not None:
            on_progress(len(texts), len(texts))
        return vectors

    return encode


def _default_name(path: str) -> str:
    parts = Path(path).absolute().parts if os.path.exists(path) else Path(path.rstrip("/")).parts
    return parts[-2] if parts[-1] == "model" and len(parts) > 1 else parts[-1]


def make_ensembles(texts: Iterable[str], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Make the ensembles of `--ensemble`, which use what their members have computed.

    An ensemble is `MODEL,MODEL` or `NAME=MODEL,MODEL`; a name of several runs is all of them, and `all` is all models.
    """
    by_name = {candidate.info.name: candidate for candidate in candidates}
    found: dict[str, Candidate] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        if not equals:
            name, listed = "ensemble" if text == _ALL else f"ensemble of {text.replace(',', ', ')}", text
        if not name or name in by_name or name in found:
            raise EvaluationOptionError(f"--ensemble {text}: the name {name!r} is empty or taken; write NAME={listed}")
        members = [by_name[member] for member in _members(text, listed, list(by_name))]
        if len(kinds := {member.info.kind for member in members}) > 1:
            raise EvaluationOptionError(
                f"--ensemble {text} has {' and '.join(sorted(kinds))}, whose similarities have different scales; "
                "name models of one kind"
            )
        model = Ensemble([member.model for member in members])
        contamination = Contamination.of_several([member.contamination for member in members])
        found[name] = Candidate(_describe_ensemble(name, [member.info for member in members]), model, contamination)
    return list(found.values())


def measure_ensemble(
    name: str, members: Sequence[ModelResults], scores: Sequence[RecordedScores], tasks: Tasks, emit: Listener
) -> ModelResults:
    """Measure an ensemble of models that were measured in other processes."""
    infos = [member.info for member in members]
    results = measure_model(Candidate(_describe_ensemble(name, infos), Ensemble(scores)), tasks, Reporter(emit))
    contamination = Contamination.of_several([Contamination(info.contamination) for info in infos])
    return replace(results, info=replace(results.info, contamination=contamination.overlap))


def _members(text: str, listed: str, names: Sequence[str]) -> list[str]:
    """Return the names of an ensemble's members."""
    if listed == _ALL and _ALL not in names:
        found = list(names)
    else:
        runs = {**group_runs(names), **{name: [name] for name in names}}
        parts = [part.strip() for part in listed.split(",")]
        if unknown := [part for part in parts if part not in runs]:
            raise EvaluationOptionError(
                f"--ensemble {text}: no model is called {unknown[0]!r}; choose from: {', '.join(runs)}"
            )
        found = list(dict.fromkeys(name for part in parts for name in runs[part]))
    if len(found) < 2:
        raise EvaluationOptionError(f"--ensemble {text} has one model; name at least two, or all")
    return found


def _describe_ensemble(name: str, members: Sequence[ModelInfo]) -> ModelInfo:
    source = f"mean of {', '.join(member.name for member in members)}"
    return ModelInfo(name, source, f"{members[0].kind}s", "pair", 0, 0)
