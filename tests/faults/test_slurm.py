"""A run by cluster/slurm/distcse.sbatch, on Slurm itself: its daemons on this machine, with two nodes."""

from __future__ import annotations

import getpass
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.commands import user_environment
from tests.conftest import ROOT
from tests.jobs import make_recipe
from tests.ports import free_port, free_ports

PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
MISSING = [
    name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name, path=PATH) is None
]
SCRIPT = ROOT / "cluster" / "slurm" / "distcse.sbatch"
CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:a100:4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:a100:4
PartitionName=all Nodes=n1,n2 Default=YES OverSubscribe=YES
"""

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurmctld slurmd slurm-client munge"
    ),
]


@pytest.fixture
def slurm() -> Iterator[dict[str, str]]:
    """Slurm's daemons with two idle nodes of 4 CPUs and 4 GPUs that no program can use; its users' environment."""
    folder = Path(tempfile.mkdtemp(prefix="dcse"))  # short, because paths of sockets are limited
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    config = folder / "slurm.conf"
    config.write_text(
        CONFIG.format(folder=folder, host=socket.gethostname(), user=getpass.getuser(), ports=free_ports(3))
    )
    environment = user_environment(
        SLURM_CONF=str(config),
        PATH=PATH,
        PYTHONPATH=str(ROOT),
        RAY_TMPDIR=str(folder),
        DISTCSE_RAY_PORT=str(free_port()),  # the default is of the job's number, which another test's Slurm also gives
        RAY_raylet_start_wait_time_s="120",  # as tests/kills.py
    )
    for gpu in range(4):
        (folder / f"gpu{gpu}").touch()
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu Type=a100 File={folder}/gpu[0-3]\n")
    munge = [
        f"--{name.replace('_', '-')}={folder}/munge.{name}" for name in ("socket", "pid_file", "seed_file", "log_file")
    ]
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for daemon in daemons:
            log = stack.enter_context(open(folder / f"{daemon[0]}-{daemon[-1]}.log".replace("/", "_"), "w"))
            process = subprocess.Popen(daemon, stdout=log, stderr=log, env=environment)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            while daemon[0] == "munged" and not (folder / "munge.socket").exists():
                assert process.poll() is None, Path(log.name).read_text()
                time.sleep(0.1)
        wait_until(lambda: ask(environment, "sinfo", "--noheader", "--format=%D %t") == "2 idle", environment, 60)
        try:
            yield environment
        finally:  # daemons that end leave jobs running
            ask(environment, "scancel", "--user", getpass.getuser())
            wait_until(lambda: ask(environment, "squeue", "--noheader") == "", environment, 120)


def ask(environment: dict[str, str], *command: str, folder: Path = ROOT) -> str:
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def wait_until(happened: Callable[[], bool], environment: dict[str, str], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, ask(environment, "scontrol", "show", "job")
        time.sleep(0.2)


def test_steps_get_the_numbers_of_cpus_and_gpus_that_the_job_asked_for(slurm: dict[str, str], tmp_path: Path) -> None:
    """Also of the second node, of GPUs by any option, and on a shared node; `--check` says what Slurm refuses."""
    (tmp_path / "ray").write_text('#!/bin/bash\necho "$SLURMD_NODENAME $*" >> asked; sleep 300\n')
    (tmp_path / "python").write_text(
        '#!/bin/bash\n[ "$1" = -c ] && echo 2 || until [ $(wc -l < asked) = 2 ]; do sleep 0.1; done\n'
    )
    for command in ("ray", "python"):
        (tmp_path / command).chmod(0o755)
    environment = {**slurm, "PATH": f"{tmp_path}:{slurm['PATH']}"}
    for options, numbers in {
        "--gpus-per-node=3": "--num-cpus=4 --num-gpus=3",
        "--gres=gpu:2 --cpus-per-task=2": "--num-cpus=2 --num-gpus=2",
        "--gres=gpu:a100:1 --cpus-per-task=3 --oversubscribe": "--num-cpus=3 --num-gpus=1",
        "--cpus-per-task=1": "--num-cpus=1 --disable-usage-stats",
    }.items():
        (tmp_path / "asked").write_text("")
        words = ["--wait", f"--chdir={tmp_path}", "--output=log", *options.split(), str(SCRIPT), "mine.yaml"]
        assert "Submitted" in ask(environment, "sbatch", *words)
        lines = sorted((tmp_path / "asked").read_text().splitlines())
        assert [line.split()[0] for line in lines] == ["n1", "n2"]
        assert all(f"ray start --block {numbers}".removeprefix("ray ") in line for line in lines), lines
    for gpus, shown in (
        (4, "ok    slurm              sbatch: Job "),
        (5, "fail  slurm              allocation failure: "),
    ):
        assert shown in ask(
            environment, "bash", str(SCRIPT), "--check", f"--gres=gpu:{gpus}", "mine.yaml", folder=tmp_path
        )


@pytest.mark.parametrize("by", ["venv", "pyxis"])
def test_a_run_is_requeued_by_a_signal_resumes_and_ends(
    slurm: dict[str, str], by: str, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """Two Ray nodes. pyxis is a stand-in, an srun that leaves out its options: the signal goes through Slurm's srun."""
    make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, "training.epochs=1")
    environment = {**slurm, "DISTCSE_VENV": str(Path(sys.executable).parents[1])}
    if by == "pyxis":
        wrapper = tmp_path / "bin" / "srun"
        wrapper.parent.mkdir()
        real = shutil.which("srun", path=PATH)
        wrapper.write_text(
            '#!/bin/bash\nfor word; do shift; [[ $word == --container-* ]] || set -- "$@" "$word"; done\n'
            f'exec {real} "$@"\n'
        )
        wrapper.chmod(0o755)
        environment |= {"DISTCSE_PYXIS": "x.sqsh", "PATH": f"{wrapper.parent}:{PATH}"}
    words = ["--parsable", f"--chdir={tmp_path}", "--output=log", str(SCRIPT), "recipe.yaml", "training.epochs=20"]
    words += [
        "training.workers=1",
        "training.cpus_per_worker=1",
        "training.log_every=2",
        "evaluation.eval_steps=200",
    ]
    job = ask(environment, "sbatch", *words)
    run = tmp_path / "runs" / f"distcse-{job}"

    def log() -> str:
        return (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""

    def has(*found: str) -> bool:
        shown = ask(slurm, "scontrol", "show", "job", job)
        assert "JobState=FAILED" not in shown and "JobState=CANCELLED" not in shown, log()
        return any(each in shown for each in found)

    events = run / "events.jsonl"
    wait_until(lambda: not has("COMPLETED") and events.exists() and '"StepReport"' in events.read_text(), slurm)
    ask(slurm, "scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: has("Restarts=1"), slurm)
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text()
    before = json.loads((latest / "trainer_state.json").read_text())
    assert before["step"] > 0 and not before["finished"], log()
    wait_until(
        lambda: has("JobState=PENDING"), slurm
    )  # Slurm would forget the new time while the job is still completing
    assert ask(slurm, "scontrol", "update", f"JobId={job}", "StartTime=now") == ""  # it waits two minutes by default
    wait_until(lambda: has("JobState=COMPLETED"), slurm)
    steps = [
        event["step"]
        for line in events.read_text().splitlines()
        if (event := json.loads(line))["event"] == "StepReport"
    ]
    assert steps == sorted(set(steps)) and (run / "evaluation.json").exists(), log()
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()] == [run.name]
