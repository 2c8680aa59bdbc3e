"""Commands on the way to a model: train, tune and embed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import dropwhile
from pathlib import Path
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
from distcse.devices import host
from distcse.devices.process import INTERRUPTED, NO_GAIN, StopOnSignal, refuse_launchers
from distcse.errors import (
    PATHS_BY_NAME,
    ArgumentError,
    MissingDependencyError,
    UnknownKeyError,
    WorkFailedError,
)
from distcse.report.progress import print_json, print_lines
from distcse.storage import is_uri, open_store, resolve_path, to_uri, without_job_copy

if TYPE_CHECKING:
    from distcse.api import Run, Runs
    from distcse.recipe import BaseRecipe, Recipe, Sweep
    from distcse.tuning.space import Space
    from distcse.tuning.sweep import SweepResult

_TUNE_PACKAGES = ("optuna", "simpleeval")


def add_commands(commands: Commands) -> None:
    """Add the commands to the tree."""
    for add in (_add_train, _add_tune, _add_embed):
        add(commands)


def _add_train(commands: Commands) -> None:
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
    commands = {
        f"{program('evaluate')} student={model}{reference} --texts FILE": "agreement and speed on your own text, without labels",
        f"{program('export')} {model} --onnx --int8": "ONNX files",
        **({f"{program('push')} {model} --to USER/NAME": "upload to the hub"} if done.improved else {}),
    }
    in_bucket = is_uri(model)
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


def _add_tune(commands: Commands) -> None:
    parser = add_command(
        commands,
        "tune",
        _tune,
        "Search a recipe's parameters with Ray Tune: many trials, one teacher pass.",
        "rankcse-listnet-bert-base --space rankcse-listnet corpus.path=text.txt.gz evaluation.data=data "
        "sweep.search.trials=48",
        kept="trials that ended are kept",
    )
    add_recipe_words(
        parser, optional=True, help="values that override the recipe's; sweep.key=value overrides the space's"
    )
    parser.add_argument("--space", metavar="SPACE", help="the search space: a packaged one's name, or a YAML file")
    parser.add_argument("--print-space", action="store_true", help="check and print the resolved space and stop")
    add_start_options(parser, "sweep", "recipe, space, text, labeled sets, models and cluster")
    add_output_options(parser)


def _tune(options: argparse.Namespace) -> int:
    from distcse.preflight.inputs import require_inputs

    refuse_launchers()
    try:
        if options.resume is not None:
            _refuse_with_resume(options)
            return _sweep(options, None)
        recipe, sweep = _recipe_and_space(options)
        if options.print_space:
            return _print_space(options, recipe, sweep)
        require_inputs(recipe)
        return _check_sweep(options, recipe, sweep) if options.dry_run else _sweep(options, (recipe, sweep))
    except ModuleNotFoundError as lacking:
        if lacking.name not in _TUNE_PACKAGES:
            raise
        raise MissingDependencyError(f"{lacking}; {host.pip_install('tune')}") from None


def _refuse_with_resume(options: argparse.Namespace) -> None:
    if options.recipe or options.space:
        raise ArgumentError("--resume takes recipe and space from the sweep's folder; name only the folder")
    if options.run_id is not None:
        raise ArgumentError("--resume takes a sweep's folder; take --run-id away")
    if options.dry_run or options.print_space:
        option = "--dry-run" if options.dry_run else "--print-space"
        raise ArgumentError(f"{option} is for a sweep that has not begun; take --resume away")


def _recipe_and_space(options: argparse.Namespace) -> tuple[BaseRecipe, Sweep]:
    """Read the recipe and the space of a new sweep."""
    from distcse.recipe import Sweep, packaged_recipes, packaged_spaces, read_recipe, read_sweep
    from distcse.recipe.base import recipe_classes
    from distcse.recipe.sweep import OVERRIDE_PREFIX

    if options.recipe is None or options.space is None:
        raise ArgumentError(
            f"name a recipe and a space: {program('tune')} RECIPE --space SPACE; recipes: "
            f"{', '.join(packaged_recipes())}; spaces: {', '.join(packaged_spaces())}"
        )
    of_space = [o.removeprefix(OVERRIDE_PREFIX) for o in options.overrides if o.startswith(OVERRIDE_PREFIX)]
    of_recipe = [o for o in options.overrides if not o.startswith(OVERRIDE_PREFIX)]
    if options.run_id is not None:
        of_recipe.append(f"storage.run_id={options.run_id}")
    try:
        recipe = read_recipe(options.recipe, of_recipe)
    except UnknownKeyError:
        recipe_keys = {key for kind in recipe_classes() for key in kind.model_fields}
        for override in of_recipe:
            key = override.partition("=")[0]
            meant = PATHS_BY_NAME.get(key, f"{OVERRIDE_PREFIX}{key}")
            if meant.removeprefix(OVERRIDE_PREFIX).partition(".")[0] in Sweep.model_fields.keys() - recipe_keys:
                raise UnknownKeyError(f"{key} is no key of the recipe; did you mean {meant!r}?") from None
        raise
    return recipe, read_sweep(options.space, of_space, override_prefix=OVERRIDE_PREFIX)


def _print_space(options: argparse.Namespace, recipe: BaseRecipe, sweep: Sweep) -> int:
    from distcse.recipe import recipe_yaml

    with loading(options):
        from distcse.tuning.space import Space

        space = Space(sweep, recipe)
    sys.stdout.write("".join(f"# {line}\n" for line in _describe_space(sweep, space)))
    sys.stdout.write(recipe_yaml(sweep))
    return 0


def _describe_space(sweep: Sweep, space: Space) -> list[str]:
    """Describe a space in a few lines: trials, schedule, seeds, and a line per parameter."""
    search = sweep.search
    trials = len(space.grid()) if search.algorithm == "grid" else search.trials
    seeds = len(sweep.final_runs.seeds)
    return [
        f"{trials} trials ({search.algorithm}), schedule {sweep.schedule.kind}, {seeds} final seed{'s' * (seeds != 1)}",
        *(f"{path}: {each.kind} {getattr(each, each.kind)}" for path, each in space.parameters.items()),
    ]


def _check_sweep(options: argparse.Namespace, recipe: BaseRecipe, sweep: Sweep) -> int:
    with loading(options) as listen:
        from distcse.cluster.backend import choose_backend
        from distcse.events import Reporter
        from distcse.runs.experiment import experiment_of
        from distcse.tuning.sweep import check
        from distcse.tuning.trial_resources import trial_resources

        check(recipe, sweep)
        experiment_of(recipe).check(
            choose_backend(recipe),
            Reporter(listen),
            lambda nodes: [*trial_resources(recipe, sweep, nodes).gpu_plans],
        )
    line = "the dry run passed; leave out --dry-run to start the sweep"
    return finish(options, [line], "Checked", recipe=options.recipe, space=options.space)


def _sweep(options: argparse.Namespace, new: tuple[BaseRecipe, Sweep] | None) -> int:
    """Begin a new sweep, or resume that of `--resume`."""
    with loading(options, lambda: start_ray(fast_allocator=True)) as listen:
        from distcse.cluster.sweep import run_sweep
        from distcse.events import Reporter
        from distcse.report.sweep_page import write_sweep_pages
        from distcse.tuning.sweep import begin, check, reopen

        directory, given = Path(), set[tuple[str, str]]()
        if new is None:
            directory = resolve_path(options.resume).absolute()
        else:
            check(*new)
            directory, given = begin(*new, Reporter(listen)), new[0].given_keys
        recipe, sweep = reopen(directory, given)
        with (stop := StopOnSignal()):
            result = run_sweep(recipe, sweep, directory, Reporter(listen, stop.stop_requested))
    _print_sweep(result, write_sweep_pages(result), options.json)
    return status_of(result)


def _print_sweep(result: SweepResult, pages: Sequence[Path], as_json: bool) -> None:
    from distcse.report.progress import format_values
    from distcse.report.sweep_page import rows_of, unfinished
    from distcse.report.terminal import print_summary

    trial = result.best_trial
    best = None if trial is None else trial.best
    if as_json:
        best_trial = None if trial is None or best is None else {"dev": best.score, "values": dict(trial.values)}
        print_json(
            [
                {
                    "event": "Finished",
                    "interrupted": result.interrupted,
                    "sweep": to_uri(result.directory),
                    "best_trial": best_trial,
                    "best_recipe": to_uri(result.best_recipe) if best_trial else None,
                    "reports": [to_uri(page) for page in pages],
                }
            ]
        )
        return
    lines = [""]
    print_summary(rows_of(result))
    if trial is not None and best is not None:
        start = "" if best.step else "  (its start: no trial is better)"
        lines += [
            f"best    dev {best.score:.2f}  {format_values(trial.values)}{start}",
            f"recipe  {to_uri(result.best_recipe)}",
        ]
    lines += [f"missing {run}" for run in unfinished(result)]
    lines += [f"report  {to_uri(file)}" for file in pages]
    lines.append(f"trials  {to_uri(result.directory / 'trials.csv')}")
    if result.interrupted:
        lines.append(f"resume  {program('tune')} --resume {to_uri(result.directory)}")
    elif trial is not None:
        lines.append(f"train   {program('train')} {to_uri(result.best_recipe)}")
    print_lines(lines)


def status_of(result: SweepResult) -> int:
    """Return a sweep's exit status: 130 interrupted, 3 if no trial is better than its start, else 0."""
    if result.interrupted:
        return INTERRUPTED
    if result.best_trial is None:
        reason = next((trial.reason for trial in result.trials if trial.reason), "see its events")
        raise WorkFailedError(f"no trial of {len(result.trials)} finished; the first failed with: {reason}")
    lost = [run for run in result.final_results if run.status != "finished"]
    if lost and len(lost) == len(result.final_results):
        raise WorkFailedError(f"none of the {len(lost)} final runs finished; the first failed with: {lost[0].reason}")
    best = result.best_trial.best
    return NO_GAIN if best is not None and not best.step else 0


def _add_embed(commands: Commands) -> None:
    parser = add_command(
        commands,
        "embed",
        _embed,
        "Embed a corpus once by every teacher of a recipe, for all later runs; or see first how far they agree.",
        "my-recipe.yaml --compare",
        kept="completed shards are kept",
    )
    add_recipe_words(parser)
    parser.add_argument(
        "--compare",
        action="store_true",
        help="embed a sample only: a card for each teacher, agreement of each two, and what the ensemble loses on the labeled "
        "dev sets without each",
    )
    parser.add_argument(
        "--fit-weights",
        action="store_true",
        help="fit the teachers' alpha to the ensemble's score on the labeled dev sets (evaluation.data), without a student",
    )
    parser.add_argument(
        "--sentences", type=int, default=2000, metavar="N", help="sentences of the comparison (default: 2000)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="read the text and ask each teacher once; of an embedding, count the rows that are left and join the cluster; "
        "embed nothing",
    )
    add_output_options(parser)


def _embed(options: argparse.Namespace) -> int:
    from distcse.preflight.inputs import require_inputs
    from distcse.recipe import load_recipe

    refuse_launchers()
    recipe = load_recipe(options.recipe, options.overrides)
    require_inputs(recipe)
    if options.compare or options.fit_weights:
        return _compare(options, recipe)
    stop = StopOnSignal("stopping after the current batch; completed shards are kept")
    with loading(options) as listen, stop:
        from distcse.api import embed

        tables = embed(recipe, dry_run=options.dry_run, listen=listen, stop_requested=stop.stop_requested)
    if options.dry_run:
        line = "the dry run of this pass passed; leave out --dry-run to start it"
        return finish(options, [line], "Checked", recipe=options.recipe)
    folders = [None if table is None else to_uri(table) for table in tables]
    lines = ["", *(f"table   {folder}" for folder in folders if folder is not None)]
    return finish(options, lines, tables=folders)


def _compare(options: argparse.Namespace, recipe: Recipe) -> int:
    stop = StopOnSignal("stopping after the current batch; the dev sets' vectors are kept")
    with loading(options) as listen, stop:
        from distcse.api import compare
        from distcse.report.terminal import print_comparison, print_ensemble_scores

        comparison, scores = compare(
            recipe,
            sentences=options.sentences if options.compare else None,
            fit_weights=options.fit_weights,
            dry_run=options.dry_run,
            listen=listen,
            stop_requested=stop.stop_requested,
        )
    if options.dry_run:
        line = "the dry run of this comparison passed; leave out --dry-run to start it"
        return finish(options, [line], "Checked", recipe=options.recipe)
    if options.json:
        parts = {"Agreement": comparison, "EnsembleScores": scores}
        print_json([{"event": event, **asdict(part)} for event, part in parts.items() if part is not None])
        return 0
    if comparison is not None:
        print_comparison(comparison)
    if scores is not None:
        print_ensemble_scores(scores)
    return 0
