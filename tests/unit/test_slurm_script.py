"""The Slurm script: what it starts on which node, and when the job is requeued. Slurm, Ray and the run are stand-ins here."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPT = ROOT / "cluster" / "slurm" / "distcse.sbatch"
STANDINS = {
    "scontrol": 'echo "scontrol $*" >> calls; if [ "$1" = show ]; then printf "a1\\na2\\na3\\n"; fi',
    "srun": 'echo "srun $*" >> calls; [[ "$*" == *hostname* ]] && echo "10.0.0.1 fe80::1" || sleep 30',
    "python": 'if [ "$1" = -c ]; then [[ "$2" == *secrets* ]] && echo secret || echo 3; exit; fi\n'
    'echo "python $* at $RAY_ADDRESS with $RAY_AUTH_TOKEN" >> calls\n'
    'trap "echo terminated >> calls; until [ -e written ]; do sleep 0.02; done; exit 130" TERM\n'
    'until grep -q -- "ray start --block" calls; do sleep 0.02; done\n'  # the other nodes' Ray begins in the background
    "for _ in $(seq ${STEPS}); do sleep 0.1; done; exit ${STATUS}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    for name, body in STANDINS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def start(folder: Path, steps: int, status: int = 0) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "a[1-3]",
        "SLURM_JOB_NAME": "distcse",
        "SLURM_JOB_ID": "7",
        "STEPS": str(steps),
        "STATUS": str(status),
    }
    return subprocess.Popen(["bash", str(SCRIPT), "mine.yaml", "seed=3"], cwd=folder, env=environment)


def calls(folder: Path) -> str:
    file = folder / "calls"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("status", [0, 1])
def test_each_node_joins_and_the_head_starts_the_run(folder: Path, status: int) -> None:
    assert start(folder, steps=0, status=status).wait() == status
    made = calls(folder)
    assert "--nodelist=a1 ray start --head --block --port=6379" in made
    assert "--nodes=2 --ntasks=2 --exclude=a1 ray start --block --address=10.0.0.1:6379" in made
    assert (
        f"python -m distcse.train mine.yaml seed=3 --run-id distcse-7 storage.runs={folder}/runs "
        f"storage.cache={folder}/cache at 10.0.0.1:6379 with secret" in made
    )
    assert "requeue" not in made


def wait_for(text: str, folder: Path, job: subprocess.Popen[bytes]) -> None:
    while text not in calls(folder):
        assert job.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize("signals", [1, 3])
def test_signals_before_the_end_of_the_job_let_the_run_end_and_requeue_the_job(folder: Path, signals: int) -> None:
    """Only the first reaches the run, which ends at a second one without its checkpoint."""
    job = start(folder, steps=300)
    wait_for("python -m", folder, job)
    job.terminate()
    wait_for("terminated", folder, job)
    for _ in range(signals - 1):
        job.terminate()
        time.sleep(0.1)
    (folder / "written").touch()
    assert job.wait() == 130
    assert calls(folder).count("terminated") == 1 and calls(folder).count("scontrol requeue 7") == 1


@pytest.mark.parametrize("signals", [0, 1])
def test_a_run_that_ends_before_it_catches_signals_requeues_the_job(folder: Path, signals: int) -> None:
    """Only where the job got one: else something on the node has ended the run."""
    (folder / "bin" / "python").write_text(
        '#!/usr/bin/env bash\nif [ "$1" = -c ]; then [[ "$2" == *secrets* ]] && echo secret || echo 3; exit; fi\n'
        f"echo begun >> calls; {'exec sleep 30' if signals else 'kill -TERM $$'}\n"
    )
    job = start(folder, steps=0)
    if signals:
        wait_for("begun", folder, job)
        job.terminate()
    assert job.wait(30) == (130 if signals else 143)
    assert ("scontrol requeue 7" in calls(folder)) == bool(signals)


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_signal_before_the_run_begins_requeues_the_job(folder: Path, nodes: int) -> None:
    """While the job waits for its nodes, and while the last one joins."""
    joins = f"until [ -e joined ]; do sleep 0.02; done; echo {nodes}; exit; fi"
    body = STANDINS["python"].replace(
        "echo 3; exit; fi", f"{{ echo asked >> calls; {joins.removesuffix('; exit; fi')}; }}; exit; fi"
    )
    (folder / "bin" / "python").write_text(f"#!/usr/bin/env bash\n{body}\n")
    job = start(folder, steps=300)
    wait_for("asked", folder, job)
    job.terminate()
    (folder / "joined").touch()
    assert job.wait(30) == 130
    assert "distcse.train" not in calls(folder) and "scontrol requeue 7" in calls(folder)


def test_a_node_on_which_ray_ends_fails_the_job(folder: Path) -> None:
    """Instead of a wait for it until the job's time is over."""
    (folder / "bin" / "srun").write_text('#!/usr/bin/env bash\n[[ "$*" == *hostname* ]] && echo 10.0.0.1\n')
    (folder / "bin" / "python").write_text("#!/usr/bin/env bash\necho 1\n")
    (folder / "bin" / "sleep").write_text("#!/usr/bin/env bash\n")
    (folder / "bin" / "sleep").chmod(0o755)
    assert start(folder, steps=0).wait() == 1
