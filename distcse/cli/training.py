"""The command train: one run, or one per seed."""

from __future__ import annotations

import argparse
import sys
from itertools import dropwhile
from typing import TYPE_CHECKING

from distcse.cli.shared import (
    Commands,
    add_command,
    add_output_options,
    add_recipe_words,
    add_start_options,
    finish,
    loading,
    program,
)
from distcse.cluster.cluster import start_ray
from distcse.devices.process import INTERRUPTED, NO_GAIN, StopOnSignal, refuse_launchers
from distcse.errors import (
    ArgumentError,
)
from distcse.report.progress import print_json, print_lines
from distcse.storage import is_uri, open_store, to_uri, without_job_copy

if TYPE_CHECKING:
    from distcse.api import Run, Runs


def add_commands(commands: Commands) -> None:
    """Add the command to the tree."""
    parser = add_command(
        commands,
        "train",
        _train,
        "Distill a student sentence encoder from frozen teachers.",
        "rankcse-listmle-bert-base corpus.path=text.txt.gz objective.rank.tau2=0.025",
        kept="the last checkpoint is kept",
    )
    add_recipe_words(parser, optional=True)
    parser.add_argument("--corpus", metavar="FILE", help="the unlabeled text, as corpus.path=FILE")
    parser.add_argument(
        "--seeds",
        nargs="+",
        metavar="N",
        help="train once with each of these seeds; the report has means ± standard deviations",
    )
    parser.add_argument("--print-recipe", action="store_true", help="print the resolved recipe and stop")
    parser.add_argument(
        "--rerun",
        metavar="RUN",
        help="repeat the run in this directory, or at this address, in a new one, on the same data, and compare the weights",
    )
    add_start_options(parser, "run", "recipe, text, labeled sets, models and cluster")
    add_output_options(parser)


def _take_seeds(options: argparse.Namespace) -> None:
    """Give the words after the numbers of `--seeds` back: the recipe and its overrides may follow them."""
    if options.seeds is not None:
        rest = [*dropwhile(str.isdecimal, options.seeds)]
        options.seeds = [int(word) for word in options.seeds[: len(options.seeds) - len(rest)]]
        if rest and options.recipe is None:
            options.recipe = rest.pop(0)
        options.overrides = [*options.overrides, *rest]
        if not options.seeds:
            raise ArgumentError("--seeds has no number; write --seeds 0 1 2")


def _train(options: argparse.Namespace) -> int:
    from distcse.preflight.inputs import require_inputs
    from distcse.recipe import read_recipe, recipe_yaml

    refuse_launchers()
    _take_seeds(options)
    overrides = _overrides(options)
    if options.print_recipe:
        source = options.recipe if options.resume is None else _stored_recipe(options.resume)
        sys.stdout.write(recipe_yaml(read_recipe(source, overrides)))
        return 0
    earlier = options.rerun or options.resume
    recipe = None if earlier else read_recipe(options.recipe, overrides)
    if recipe is not None:
        require_inputs(recipe)
    if recipe is not None and options.dry_run:
        with loading(options) as listen:
            from distcse.api import check

            check(recipe, listen=listen)
        line = "the dry run passed; leave out --dry-run to start the run"
        return finish(options, [line], "Checked", recipe=options.recipe)
    start = start_ray if recipe is not None and recipe.uses_ray else None
    with loading(options, start) as listen, (stop := StopOnSignal()):
        from distcse.api import Run, rerun, resume, run

        if recipe is not None:
            done = run(recipe, listen=listen, stop_requested=stop.stop_requested)
        else:
            again = resume if options.rerun is None else rerun
            done = again(earlier, *overrides, listen=listen, stop_requested=stop.stop_requested)
    if isinstance(done, Run):
        _print_run(done, options.json)
    else:
        _print_runs(done, options.json)
    return INTERRUPTED if done.interrupted else 0 if done.improved else NO_GAIN


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides of a run."""
    from distcse.recipe import packaged_recipes

    if options.rerun is None and options.resume is None:
        if options.recipe is None:
            raise ArgumentError(f"name a recipe or a YAML file; packaged recipes: {', '.join(packaged_recipes())}")
        typed = {"corpus": options.corpus, "seeds": options.seeds, "storage.run_id": options.run_id}
        return [*options.overrides, *(f"{path}={value}" for path, value in typed.items() if value is not None)]
    option = "--resume" if options.rerun is None else "--rerun"
    overrides = [*([options.recipe] if options.recipe else []), *options.overrides]
    if overrides and "=" not in overrides[0]:
        raise ArgumentError(f"{option} takes the recipe from the run's folder; take {overrides[0]} away")
    for name in ("run_id", "seeds", "corpus"):
        if getattr(options, name) is not None:
            raise ArgumentError(f"{option} takes a run's folder; take --{name.replace('_', '-')} away")
    if options.rerun is not None and (options.resume is not None or options.print_recipe or options.dry_run):
        raise ArgumentError("--rerun starts over, with the recipe of the run's folder; leave out the other option")
    if options.dry_run and not options.print_recipe:
        raise ArgumentError("--dry-run is for a run that has not begun; take --resume away")
    return overrides


def _stored_recipe(run: str) -> str:
    """Fetch a run's stored recipe and return its path."""
    store = open_store(run)
    store.fetch("recipe.yaml")
    return str(store.path / "recipe.yaml")


def _print_run(done: Run, as_json: bool) -> None:
    from distcse.report.terminal import print_evaluation, print_remarks, results_as_json

    evaluation = done.result.evaluation
    if as_json:
        finished = {
            "event": "Finished",
            "interrupted": done.interrupted,
            "run": done.uri,
            "models": {name: to_uri(model) for name, model in done.models.items()},
            "unchanged": done.result.unchanged,
            "reports": [to_uri(file) for file in done.reports],
            **({} if done.compared is None else {"weights": done.compared.description}),
        }
        print_json([*(results_as_json(evaluation) if evaluation else []), finished])
        return
    if evaluation is not None:
        print_remarks(evaluation)
        print_evaluation(evaluation)
    lines = ["", *done.result.summary, f"run     {done.uri}"]
    if done.compared is not None:
        lines.append(f"weights {done.compared.description}")
    print_lines([*lines, *(f"report  {to_uri(file)}" for file in done.reports), *commands_for(done)])


def _print_runs(done: Runs, as_json: bool) -> None:
    """Print the scores of several seeds' runs, and where the runs are."""
    from distcse.report.terminal import print_evaluation, print_remarks, results_as_json

    scores = done.scores
    if as_json:
        finished = {
            "event": "Finished",
            "interrupted": done.interrupted,
            "runs": {seed: run.uri for seed, run in done.by_seed.items()},
            "reports": [to_uri(file) for file in done.reports],
        }
        print_json([*(results_as_json(scores.evaluation) if scores else []), finished])
        return
    if scores is not None:
        print_remarks(scores.evaluation)
        print_evaluation(scores.evaluation)
    lines = ["", *(f"run     seed {seed:<4}  {run.uri}" for seed, run in done.by_seed.items())]
    if done.interrupted:
        lines.append(f"resume  the same command with --run-id {done.directory.name}")
    print_lines([*lines, *(f"report  {to_uri(file)}" for file in done.reports)])


def commands_for(done: Run) -> list[str]:
    """Return the lines that say what to do with a run next: resume it, use its model, evaluate it."""
    resume = [f"resume  {program('train')} --resume {done.uri}"] if done.interrupted else []
    if not done.models:
        return resume
    model = done.uri if len(done.models) == 1 else to_uri(next(iter(done.models.values())))
    reference = ""
    if (found := done.result.reference) is not None:
        pooling = "" if found.section.pooling is None else f" --pooling {found.section.pooling}"
        against = "" if found.name == "teacher" else f" --against {found.name}"
        reference = f" {found.name}={without_job_copy(found.section.backbone)}{against}{pooling}"
    in_bucket = is_uri(model)
    out = " --out FOLDER" if in_bucket else ""
    commands = {
        f"{program('evaluate')} student={model}{reference} --texts FILE": "agreement and speed on your own text, without labels",
        f"{program('export')} {model} --onnx --int8{out}": "ONNX files",
        **({f"{program('push')} {model} --to USER/NAME": "upload to the hub"} if done.improved else {}),
    }
    loaded = 'str(resolve_model("{}"))' if in_bucket else '"{}"'
    use = [
        "# use in Python",
        *(["from distcse.models import resolve_model"] if in_bucket else []),
        "from sentence_transformers import SentenceTransformer",
        *(f"model = SentenceTransformer({loaded.format(to_uri(folder))})" for folder in done.models.values()),
        'print(model.similarity(model.encode(["How do I sort a list?"]), model.encode(["Order the items."])))',
    ]
    return [
        *resume,
        "",
        *(line for command, purpose in commands.items() for line in (f"# {purpose}", command)),
        *(use if len(done.models) == 1 else []),
    ]
