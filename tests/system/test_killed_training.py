"""A training that is killed and started again ends with the very weights of an undisturbed one."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(240)]
TRAINING = Path(__file__).with_name("killed_training.py")
TWO = ("--num-instances", "2", "--num-replicas", "4")


def digests(text):
    return sorted(re.findall(r"(\[1,\d\]).*digest (\w+)", text))


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory):
    """The final digests of a training that nobody disturbs."""
    done = subprocess.run(
        [sys.executable, "-m", "poprun_py", *TWO, *warm, TRAINING, tmp_path_factory.mktemp("c")],
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    found = digests(done.stdout)
    assert len(found) == 2
    return found


def kill_at_random(poprun, folder, dice, out):
    """Start the training, and kill an instance or the launcher at a random moment."""
    pause = "0.02"
    job = poprun(*TWO, "--output-dir", out, TRAINING, folder, pause, start=True)
    output = out / "latest" / "attempt-1" / "instance-0.stdout"
    wait_until(
        lambda: job.poll() is not None or (output.exists() and "resumed" in output.read_text()), 40
    )
    time.sleep(dice.uniform(0, 1.2))
    victims = [job.pid, *programs(poprun)]
    with contextlib.suppress(ProcessLookupError):  # the training may have ended by now
        os.kill(dice.choice(victims), signal.SIGKILL)
    job.communicate(timeout=60)
    wait_until(lambda: not poprun.survivors())
    output.unlink(missing_ok=True)


def programs(poprun):
    """Return the pids of the training processes."""
    found = []
    for pid in poprun.survivors():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if len(words) > 1 and words[1] == str(TRAINING).encode():
            found.append(pid)
    return found


def train_with_kills(poprun, tmp_path, kills, seed):
    folder, dice = tmp_path / "checkpoints", random.Random(seed)
    for _ in range(kills):
        kill_at_random(poprun, folder, dice, tmp_path / "out")
    done = poprun(*TWO, TRAINING, folder, timeout=100)
    assert done.returncode == 0, done.stderr
    return digests(done.stdout)


@pytest.mark.long
def test_killed_training_goes_on_to_the_bit(poprun, tmp_path, undisturbed):
    assert train_with_kills(poprun, tmp_path, 2, seed=2) == undisturbed


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_training_killed_twenty_times_goes_on_to_the_bit(poprun, tmp_path, undisturbed):
    assert train_with_kills(poprun, tmp_path, 20, seed=3) == undisturbed


@pytest.mark.sweep
def test_restarts_by_the_launcher_go_on_to_the_bit(poprun, warm, tmp_path, undisturbed):
    env = {"DIE_ONCE_AT": "1:9"}
    done = poprun(
        *TWO, "--max-restarts", "1", *warm, TRAINING, tmp_path / "c", env=env, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "resumed at 8" in done.stdout
    assert digests(done.stdout) == undisturbed


def test_a_restart_from_memory_goes_on_to_the_bit(poprun, warm, tmp_path, undisturbed):
    words = ("--memory-checkpoints", "--max-restarts", "1")
    env = {"DIE_ONCE_AT": "1:9"}
    done = poprun(*TWO, *words, *warm, TRAINING, tmp_path / "c", env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "resumed at 9" in done.stdout
    assert digests(done.stdout) == undisturbed


@pytest.mark.sweep
def test_preempted_training_goes_on_to_the_bit(poprun, warm, tmp_path, undisturbed):
    # Not a forked one: the library has to get the signals.
    job = poprun(*TWO, TRAINING, tmp_path / "c", "0.05", start=True)
    wait_until(lambda: (tmp_path / "c").exists(), 90)
    job.send_signal(signal.SIGUSR1)
    stdout, stderr = job.communicate(timeout=60)
    assert job.returncode == 75, stderr
    stops = set(re.findall(r"stopped at (\d+)", stdout))
    assert len(stops) == 1
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    done = poprun(*TWO, *warm, TRAINING, tmp_path / "c", timeout=100)
    assert set(re.findall(r"resumed at (\d+)", done.stdout)) == stops
    assert digests(done.stdout) == undisturbed
    # Another number of instances goes on from it as well.
    alone = poprun("--num-replicas", "4", *warm, TRAINING, tmp_path / "copy", timeout=100)
    assert alone.returncode == 0, alone.stderr
    assert f"resumed at {stops.pop()}" in alone.stdout
    assert "steps 24" in alone.stdout
