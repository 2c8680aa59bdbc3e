"""Commands for a cluster that others operate: submit, jobs, logs and stop."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING

from distcse.cli.shared import Commands, add_command, add_recipe_words, finish
from distcse.report.progress import print_lines

if TYPE_CHECKING:
    from distcse.jobs import Job


def add_commands(commands: Commands) -> None:
    """Add the commands to the tree."""
    submit = add_command(
        commands,
        "submit",
        _submit,
        "Submit a recipe's run to a cluster, with distcse, its requirements and the recipe's files.",
        "my-recipe.yaml training.workers=4 --cluster prod --follow",
        kept="a submitted job continues; distcse stop ends it",
    )
    add_recipe_words(submit, help="values that override the recipe's and the cluster's")
    submit.add_argument("--space", metavar="SPACE", help="search this space, as `distcse tune` does")
    submit.add_argument("--run-id", metavar="ID", help="resume the run with this id, which an earlier job began")
    submit.add_argument("--dry-run", action="store_true", help="check on the cluster what the run needs; train nothing")
    jobs = add_command(commands, "jobs", _jobs, "List a cluster's jobs.", "--cluster prod")
    logs = add_command(
        commands, "logs", _logs, "Print what a job has printed.", "ID --follow", kept="the job continues"
    )
    stop = add_command(
        commands, "stop", _stop, "Stop a job with a checkpoint.", "ID", kept="the job stops; see distcse logs"
    )
    for parser in (logs, stop):
        parser.add_argument("id", metavar="ID", help="the job's id")
    for parser in (submit, logs):
        parser.add_argument(
            "--follow", action="store_true", help="print the job's log until it ends; exit with its status"
        )
    for parser in (submit, jobs, logs, stop):
        parser.add_argument(
            "--cluster",
            metavar="NAME",
            help="a cluster of clusters.yaml (here, or in ~/.config/distcse), or http://HEAD:8265; default: the only one",
        )
    for parser in (submit, jobs):
        parser.add_argument("--json", action="store_true", help="print one JSON object")


def _submit(options: argparse.Namespace) -> int:
    from distcse.jobs import submit

    job = submit(
        options.recipe,
        *options.overrides,
        cluster=options.cluster,
        space=options.space,
        run_id=options.run_id,
        dry_run=options.dry_run,
    )
    words = f"{job.id} --cluster {shlex.quote(job.cluster.name)}"
    lines = [f"job     {job.id}", f"follow  distcse logs {words} --follow", f"stop    distcse stop {words}"]
    finish(options, lines, "Submitted", job=job.id, cluster=job.cluster.name)
    return _follow(job) if options.follow else 0


def _follow(job: Job) -> int:
    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    job.follow(write)
    return job.exit_status()


def _jobs(options: argparse.Namespace) -> int:
    from distcse.jobs import JobCluster

    rows = [
        {
            "id": job.id,
            "status": details.status.lower(),
            "start_time_ms": details.start_time,
            "command": details.entrypoint,
        }
        for job, details in JobCluster(options.cluster).jobs().items()
    ]
    width = max((len(row["id"]) for row in rows), default=0)
    lines = [f"{row['id']:<{width}}  {row['status']:<9}  {row['command']}" for row in rows]
    return finish(options, lines or ["no jobs"], "Jobs", jobs=rows)


def _logs(options: argparse.Namespace) -> int:
    job = _job(options)
    if options.follow:
        return _follow(job)
    sys.stdout.write(job.logs())
    return 0


def _stop(options: argparse.Namespace) -> int:
    job = _job(options)
    print_lines([f"{job.id} {job.stop()}"])
    return 0


def _job(options: argparse.Namespace) -> Job:
    from distcse.jobs import Job, JobCluster

    return Job(options.id, JobCluster(options.cluster))
