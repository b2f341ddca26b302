"""Unbalanced real jobs: the views, the log and the report name who is slow, and why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from support.terminals import LAUNCHER, Typist, screen_of

pytestmark = pytest.mark.mpi

COMPUTES, LOADS, SHARES = 1, 3, 5
TAKEN_CPU = min(os.sched_getaffinity(0))
CAUSES = {
    COMPUTES: "it computes longer",
    LOADS: "it loads data longer",
    SHARES: "it shares its CPUs",
}
# Each step is a meeting. What is slow sleeps, so that it does not slow the others as well; but one
# needs the CPU that something else has taken.
PROGRAM = f"""
import os, sys, time
from pathlib import Path
import numpy
import popdist_py
from popdist_py import activities, heartbeat

popdist_py.init()
index = popdist_py.getInstanceIndex()
if index == {SHARES}:
    os.sched_setaffinity(0, [{TAKEN_CPU}])
ends = numpy.zeros(1)
while not ends[0]:
    with activities.doing(activities.LOADING):
        time.sleep(0.06 if index == {LOADS} else 0.002)
    with activities.doing(activities.COMPUTING):
        time.sleep(0.06 if index == {COMPUTES} else 0.002)
        until = time.process_time() + 0.05
        while index == {SHARES} and time.process_time() < until:
            pass
    ends[0] = index == 0 and Path("stop").exists()
    popdist_py.all_reduce(ends)
    heartbeat.step(4)
"""


@contextlib.contextmanager
def taken_cpu():
    """Keep a CPU busy, twice over: who needs it gets a third."""
    code = f"import os\nos.sched_setaffinity(0, [{TAKEN_CPU}])\nwhile True: pass"
    # Linux shares CPUs by session first, and the job has one of its own.
    busy = [
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(2)
    ]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def status(poprun, *words):
    return poprun("--status-format", "json", *words)


@pytest.mark.long
def test_who_is_slow_is_named_with_the_reason_by_log_status_summary_and_report(
    poprun, script, tmp_path
):
    with taken_cpu():
        job = poprun(
            "--live", "-n", 7, "--oversubscribe",
            "--output-dir", "out", script(PROGRAM), start=True,
        )  # fmt: skip
        said, named = "", dict.fromkeys(CAUSES, False)
        while not all(named.values()):
            line = job.stderr.readline()
            assert line, said
            said += line
            for instance, cause in CAUSES.items():
                named[instance] |= f"instance {instance} on" in line and f": {cause}" in line
        done = status(poprun, f"--status={job.pid}")
        by_run = status(poprun, "--status=" + json.loads(done.stdout)["run_id"])
        by_folder = poprun(f"--status={tmp_path / 'out' / 'latest'}")
        (tmp_path / "stop").touch()
        rest = job.communicate(timeout=60)[1]
    view = json.loads(done.stdout)
    assert view["slowest"]["is_straggler"]
    assert view["slowest"]["instance"] in CAUSES
    assert [each["index"] for each in view["instances"]] == list(range(7))
    for each in view["instances"]:
        assert each["phase"] == "training"
        assert each["step"] > 10
        assert each["memory_bytes"] > 1 << 20
        assert each["shares"]["waiting"] >= (0.3 if each["index"] not in CAUSES else 0)
        assert sum(each["shares"].values()) == pytest.approx(1, abs=0.01)
    step = view["instances"][0]["step_seconds"]["median"]
    assert view["samples_per_second"] == pytest.approx(7 * 4 / step, rel=0.5)
    assert json.loads(by_run.stdout)["pid"] == job.pid
    assert by_folder.stdout.startswith("program.py: run ")
    assert "training" in by_folder.stdout

    summary = [line.split(": ")[1:] for line in rest.splitlines()[-6:-1]]
    assert [line[0] for line in summary] == ["speed", "step", "time", "slowest", "use"]
    assert "samples/s in total, 7 instances" in summary[0][1]
    report = json.loads((tmp_path / "out/latest/report.json").read_text())
    observed = report["attempts"][-1]["observation"]
    assert observed["slowest"]["instance"] in CAUSES
    assert {each["phase"] for each in observed["instances"]} == {"ended"}


def test_no_job_and_a_job_that_nobody_knows_are_said(look):
    gone = look(f"--status={os.getpid()}")
    assert (gone.returncode, gone.stderr.count("\n")) == (3, 1)
    assert f"--status={os.getpid()}: no job of yours" in gone.stderr
    unknown = look("--status", "nobodys-run")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (3, 1)
    # The second, where the launcher of another test is stopped just now.
    said = (
        r"--status=nobodys-run: no (such job of yours runs on this host|job of this name answers)"
    )
    assert re.search(said, unknown.stderr)


WAITS = """
import popdist_py, sys
popdist_py.init()
print("begun", flush=True)
sys.stdin.read() if popdist_py.getInstanceIndex() == 0 else popdist_py.barrier()
"""


@pytest.mark.sweep
def test_a_stopped_launcher_is_said_to_be_and_hides_no_other_job(
    poprun, script, tmp_path, monkeypatch
):
    monkeypatch.setenv("POPRUN_LEASES", "none")  # two jobs at once
    program, pipe = script(WAITS), subprocess.PIPE
    jobs = [poprun("-n", 1, "--output-dir", name, program, start=True, stdin=pipe) for name in "ab"]
    for job in jobs:
        assert "begun" in job.stdout.readline()
    first, second = jobs
    for stopped, other, folder in ((first, second, "b"), (second, first, "a")):
        os.kill(stopped.pid, signal.SIGSTOP)
        asked = poprun(f"--status={stopped.pid}")
        by_folder = poprun(
            f"--status={tmp_path / folder / 'latest'}", env={"PYTHONIOENCODING": "ascii"}
        )
        unknown = poprun("--status=nobodys-run")
        os.kill(stopped.pid, signal.SIGCONT)
        assert (asked.returncode, asked.stdout) == (3, "")
        assert f"launcher {stopped.pid} is stopped (Ctrl-Z)" in asked.stderr
        assert f"kill -CONT {stopped.pid}" in asked.stderr
        assert f"launcher {other.pid}" in by_folder.stdout
        assert "\n-----" in by_folder.stdout
        assert "no job of this name answers; launcher" in unknown.stderr
    for job in jobs:
        job.communicate("", timeout=60)


TALKS = """
import sys, time
from pathlib import Path
import popdist_py
from popdist_py import heartbeat

popdist_py.init()
number = 0
while not popdist_py.broadcast(Path("stop").exists()):
    number += 1
    print("line", number, flush=True)
    time.sleep(0.1)
    heartbeat.step(8)
name = input("name? ") if popdist_py.getInstanceIndex() == 0 else ""
popdist_py.barrier()
print("bye", name)
"""
ROWS, COLUMNS = 30, 120


def test_at_a_terminal_the_view_stays_below_the_output(script, tmp_path):
    command = [*LAUNCHER, "--live", "-n", "2", script(TALKS)]

    def lines():
        return screen_of(user.seen, columns=COLUMNS, rows=ROWS)

    def is_whole(shown):
        """Tell whether the screen ends with the table and has output above it."""
        heads = [number for number, line in enumerate(shown) if line.startswith("instance ")]
        return (
            len(heads) == 1
            and "training" in shown[-1]
            and shown[heads[0] - 3].startswith("[1,") is False
            and any("<stdout>:line" in line for line in shown[: heads[0]])
        )

    with Typist(command, cwd=tmp_path, size=(ROWS, COLUMNS)) as user:
        user.wait_until(lambda: is_whole(lines()))
        (tmp_path / "stop").touch()
        user.expect(r"name\? ")
        # It is drawn again below a prompt, and what is typed stands behind that.
        user.wait_until(lambda: "waiting" in lines()[-1] or "training" in lines()[-1])
        user.type("someone\r")
        user.expect("bye someone")
        assert user.ended() == 0
    shown = lines()
    numbers = [line for line in shown if line.startswith("[1,0]<stdout>:line ")]
    assert numbers
    assert numbers == [f"[1,0]<stdout>:line {n}" for n in range(1, len(numbers) + 1)]
    assert any(line.endswith("name? someone") for line in shown)
    # At the end the view is gone, and the summary is there.
    assert not any(line.startswith("instance ") for line in shown)
    assert sum(line.startswith("poprun-py: speed: ") for line in shown) == 1
    assert shown[-1].startswith("poprun-py: use: ")


@pytest.mark.sweep
def test_a_terminal_that_cannot_move_the_cursor_gets_lines(script, tmp_path):
    command = [*LAUNCHER, "--live", "-n", "2", script(TALKS)]
    with Typist(command, cwd=tmp_path, size=(ROWS, COLUMNS), env={"TERM": "dumb"}) as user:
        user.expect("poprun-py: program.py: run ")
        (tmp_path / "stop").touch()
        user.expect(r"name\? ")
        user.type("someone\r")
        user.expect("bye someone")
        assert user.ended() == 0
    assert "\x1b" not in user.seen


@pytest.mark.sweep
def test_ctrl_z_and_fg_and_a_narrower_window(script, tmp_path):
    shell = ["bash", "--norc", "-i"]
    words = " ".join(map(str, [*LAUNCHER, "--live", "-n", "2", script(TALKS)]))
    with Typist(shell, cwd=tmp_path, size=(ROWS, COLUMNS), env={"PS1": "$ "}) as user:
        user.expect(r"\$ ")
        user.type(words + "\r")
        user.expect("instance .*training")
        user.type("\x1a")
        user.expect(r"Stopped.*\$ ")
        user.resize(ROWS, 60)
        user.type("fg\r")
        user.expect(r"line \d+")
        start = len(user.seen)

        def rows():
            return [row.partition("\x1b")[0] for row in user.seen[start:].split("\x1b[1E")[1:]]

        user.wait_until(lambda: any("training" in row for row in rows()))
        assert max(map(len, rows())) < 60
        (tmp_path / "stop").touch()
        user.expect(r"name\? ")
        user.type("someone\r")
        user.expect("bye someone")
        user.expect(r"\$ $")
        user.type("echo code $?; exit\r")
        user.expect("code 0")
        user.ended()


# Instance 1 is late three times in a step: before the buffers are broadcast, before the gradients
# are reduced, and before a collective of the program's own.
DDP = """
import os, time
import torch
import torch.distributed as dist
import popdist_py.torch_backend
from popdist_py import heartbeat

torch.set_num_threads(1)
dist.init_process_group(os.environ["BACKEND"])
index, late = dist.get_rank(), os.environ["LATE"]
layers = torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
for _ in range(40):
    time.sleep(0.05 if (index, late) == (0, "forward") else 0)
    loss = model(torch.randn(16, 64)).square().mean()
    time.sleep(0.05 if (index, late) == (1, "backward") else 0)
    loss.backward()
    time.sleep(0.05 if (index, late) == (1, "all_reduce") else 0)
    dist.all_reduce(loss.detach())
    heartbeat.step(16)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("late", "slow", "backend"),
    [
        pytest.param("all_reduce", 1, "gloo", marks=pytest.mark.sweep),
        pytest.param("forward", 0, "popdist", marks=pytest.mark.long),
        pytest.param("backward", 1, "gloo", marks=pytest.mark.long),
    ],
)
def test_of_torchs_own_ddp_the_slow_rank_is_known(poprun, script, tmp_path, late, slow, backend):
    variables = ("--env", f"LATE={late}", "--env", f"BACKEND={backend}")
    done = poprun("-n", 2, "--live", "--output-dir", "out", *variables, script(DDP))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "out/latest/report.json").read_text())
    instances = report["attempts"][-1]["observation"]["instances"]
    waited = [each["seconds"]["waiting"] for each in instances]
    assert waited[1 - slow] > 39 * 0.05 * 0.8
    assert waited[slow] < waited[1 - slow] / 2


BAR = """
import os, sys, time
from pathlib import Path
for percent in (10, 20):
    if os.environ["RANK"] == "1":
        sys.stderr.write(f"\\r {percent}%|{'#' * 60}| {percent}/100 [00:01<00:01]")
        sys.stderr.flush()
    while not Path(f"stop{percent}").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("wraps_anew", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_a_bar_and_the_panel_fit_into_a_window_made_narrower(script, tmp_path, wraps_anew):
    resizes = []

    def is_whole(columns, percent):
        """Tell whether the screen has one bar, one panel below it, and no other rows."""
        shown = screen_of(
            user.seen, columns=100, rows=ROWS, resizes=resizes, wraps_anew=wraps_anew
        )  # fmt: skip
        bars = [row for row in shown if row.startswith(f"[1,1]<stderr>: {percent}%|#")]
        heads = [number for number, row in enumerate(shown) if row.startswith("instance ")]
        return (
            len(bars) == len(heads) == 1
            and bars == [row for row in shown if "#" in row]
            and bars[0].endswith(f"{percent}/100 [00:01<00:01]")
            and shown[-2].split()[0] == "0"
            and shown[-1].split()[0] == "1"
            and sum("program.py: run " in row for row in shown) == 1
            and max(map(len, shown)) <= columns
        )

    command = [*LAUNCHER, "--live", "-n", "2", script(BAR)]
    with Typist(command, cwd=tmp_path, size=(ROWS, 100)) as user:
        user.wait_until(lambda: is_whole(100, 10))
        for columns in (60, 80, 50):
            # Output that is on its way belongs to the earlier size.
            before = -1
            while before < len(user.seen):
                before = len(user.seen)
                user.read()
            resizes.append((len(user.seen), columns))
            user.resize(ROWS, columns)
            user.wait_until(lambda size=columns: is_whole(size, 10))
        (tmp_path / "stop10").touch()
        user.wait_until(lambda: is_whole(50, 20))
        (tmp_path / "stop20").touch()
        assert user.ended() == 0
