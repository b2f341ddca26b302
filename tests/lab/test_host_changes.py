"""Jobs that lose hosts, get hosts back, and get additional hosts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
TRAINING = Path(__file__).with_name("training_program.py")
FEWER = ("--allow-fewer-hosts",)
POPRUN = (sys.executable, "-m", "poprun_py")

# Steps whose state is a file that instance 0 writes. Each step adds a line with its number, the
# number of instances, and the hosts. The program ends at step ``last``, or when a file asks for it.
# Each attempt adds a line with the hosts and the wrappers of the instances to another file.
PROGRAM = """\
import os, socket, sys, time
from pathlib import Path
import popdist_py
from popdist_py import heartbeat

folder, has_model, asks, last = Path(sys.argv[1]), *map(int, sys.argv[2:5])
if has_model:
    heartbeat.expect()
popdist_py.init()
state, log = folder / "state", folder / "log"
step = int(state.read_text()) if state.exists() else 0
heartbeat.resume(step)
wrappers = popdist_py.all_gather_object(f"{socket.gethostname()}:{os.getppid()}")
if popdist_py.getInstanceIndex() == 0:
    with (folder / "wrappers").open("a") as file:
        print(*wrappers, file=file)
while step < last and not (folder / "end").exists():
    hosts = popdist_py.all_gather_object(socket.gethostname())
    time.sleep(0.05)
    step += 1
    heartbeat.step()
    if popdist_py.getInstanceIndex() == 0:
        (folder / "new").write_text(str(step))
        (folder / "new").rename(state)
        with log.open("a") as file:
            print(step, popdist_py.getNumTotalReplicas(), *hosts, file=file)
    popdist_py.barrier()
    if asks and popdist_py.stopRequested():
        sys.exit(popdist_py.RESUME_EXIT_CODE)
"""


class Job:
    """A job on hosts of a lab, whose instances write their steps to a file."""

    def __init__(self, lab, folder, *options, has_model=True, asks=True, last=100_000):
        self.lab, self.folder = lab, folder
        program = folder / "steps.py"
        program.write_text(PROGRAM)
        words = (folder, int(has_model), int(asks), last)
        self.process = lab[0].start(
            *(*POPRUN, "--grace", "2", "--max-restarts", "3", "--output-dir", folder / "runs"),
            *(*options, program, *words),
        )

    def lines(self):
        log = self.folder / "log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def wait_for(self, hosts, seconds=60):
        """Wait until a step was made on exactly these hosts, one for each instance."""
        wait_until(
            lambda: any(line[2:] == hosts for line in self.lines()[-1:]),
            seconds,
            f"no step on {hosts}",
        )

    def end(self):
        (self.folder / "end").touch()
        _, stderr = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, stderr
        return stderr

    def check(self, replicas=4, repeated=1):
        """Check that steps were repeated at most once a restart, and that none was left out."""
        steps = [int(line[0]) for line in self.lines()]
        assert sorted(set(steps)) == list(range(1, max(steps) + 1))
        assert len(steps) - len(set(steps)) <= repeated
        assert {int(line[1]) for line in self.lines()} == {replicas}

    def attempts(self):
        return json.loads(Path(self.folder, "runs/latest/report.json").read_text())["attempts"]


def test_a_lost_host_is_replaced_by_more_replicas_and_taken_in_again(make_lab, tmp_path):
    lab = make_lab(2)
    job = Job(
        *(lab, tmp_path, "--host", "node0:1,node1:1", "-n", "2", "--num-replicas", "4"),
        *("--allow-fewer-hosts", "--wait-for-hosts"),
    )
    job.wait_for(["node0", "node1"])
    lab[1].kill()
    job.wait_for(["node0"])
    lab.switch_on(1)
    job.wait_for(["node0", "node1"])
    said = job.end()
    job.check()
    assert (
        "the job continues without host node1: 1 instance with 4 replicas each, instead of 2 in"
    ) in said
    assert (
        "the job continues with host node1: 2 instances with 2 replicas each, instead of 1 in"
    ) in said
    assert [each["cause"] for each in job.attempts()] == ["failed", "hosts", "completed"]
    assert [len(each["instances"]) for each in job.attempts()] == [2, 1, 2]


def test_wrappers_of_the_hosts_that_stay_run_the_next_programs(make_lab, tmp_path):
    lab = make_lab(3)
    job = Job(
        *(lab, tmp_path, "--host", lab.names(), "-n", "3", "--num-replicas", "6", *FEWER),
        *("--wait-for-hosts", "--memory-checkpoints"),
    )
    job.wait_for(["node0", "node1", "node2"])
    lab[1].kill()
    job.wait_for(["node0", "node2"])
    lab.switch_on(1)
    job.wait_for(["node0", "node1", "node2"])
    job.end()
    job.check(replicas=6)
    lines = (tmp_path / "wrappers").read_text().splitlines()
    first, fewer, again = (dict(each.split(":") for each in line.split()) for line in lines)
    assert fewer == {name: first[name] for name in ("node0", "node2")}
    assert fewer.items() < again.items()


def test_a_host_that_is_lost_while_a_restart_begins_is_left_out_as_well(make_lab, tmp_path):
    lab = make_lab(3)
    job = Job(lab, tmp_path, "--host", lab.names(), "-n", "3", "--num-replicas", "6", *FEWER)
    job.wait_for(["node0", "node1", "node2"])
    lab[1].kill()
    lines = [job.process.stderr.readline()]
    while "(restart 1 of 3)" not in lines[-1]:
        lines.append(job.process.stderr.readline())
        assert lines[-1], lines
    lab[2].kill()
    wait_until(lambda: set(job.lines()[-1][2:]) == {"node0"}, 90, "the job does not go on on node0")
    said = job.end()
    job.check(replicas=6, repeated=2)
    assert "the job continues without host node2" in said


def test_processes_that_are_replicas_keep_their_number_and_wait_for_a_restart(make_lab, tmp_path):
    lab = make_lab(2)
    job = Job(
        *(lab, tmp_path, "--host", "node0:1,node1:1", "-n", "2"),
        *("--allow-fewer-hosts", "--wait-for-hosts=60s"),
        has_model=False,
        asks=False,
    )
    job.wait_for(["node0", "node1"])
    lab[1].kill()
    job.wait_for(["node0", "node0"])
    lab.switch_on(1)
    lines = [job.process.stderr.readline()]
    while "the job will use new hosts after its next restart" not in lines[-1]:
        lines.append(job.process.stderr.readline())
        assert lines[-1], lines
    pids = lab[0].run("pgrep", "-f", f"^{sys.executable} {job.folder}/steps.py").stdout.split()
    lab[0].run("kill", "-9", pids[0])
    job.wait_for(["node0", "node1"])
    said = "".join(lines) + job.end()
    job.check(replicas=2, repeated=2)
    assert "the job continues without host node1: the instances share cores, because fewer" in said
    assert "the job continues with host node1\n" in said


def test_a_job_without_its_host_waits_for_the_host(make_lab, tmp_path):
    lab = make_lab(2)
    job = Job(lab, tmp_path, "--host", "node0,node1", "-n", "2", "--wait-for-hosts")
    job.wait_for(["node0", "node1"])
    lab[1].kill()
    lines = [job.process.stderr.readline()]
    while "waiting until the lost hosts can be used again (--wait-for-hosts)" not in lines[-1]:
        lines.append(job.process.stderr.readline())
        assert lines[-1], lines
    num_steps = len(job.lines())
    lab.switch_on(1)
    wait_until(lambda: len(job.lines()) > num_steps, 60, "the job does not go on")
    job.end()
    job.check(replicas=2)
    assert {tuple(line[2:]) for line in job.lines()} == {("node0", "node1")}


def test_a_user_adds_a_host_to_a_running_job(make_lab, tmp_path):
    lab = make_lab(2)
    job = Job(lab, tmp_path, "--host", "node0:1", "--num-replicas", "4", "--run-name", "grows")
    job.wait_for(["node0"])

    def add(host):
        done = lab[0].poprun("--add-host", "grows", host)
        return done.returncode, done.stdout + done.stderr

    code, said = add("node0")
    assert (code, "host node0 is already part of the job" in said) == (3, True)
    code, said = add("nowhere")
    assert (code, "host nowhere: the host name cannot be resolved" in said) == (3, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert lab[1].run("mount", "--bind", empty, Path(sys.prefix)).returncode == 0
    code, said = add("node1")
    assert (code, f"host node1: {sys.executable} does not run on the host" in said) == (3, True)
    assert lab[1].run("umount", Path(sys.prefix)).returncode == 0
    code, said = add("node1")
    assert (code, "host node1 is added to the job" in said) == (0, True)
    job.wait_for(["node0", "node1"])
    said = job.end()
    job.check(repeated=0)
    assert (
        "the job continues with host node1: 2 instances with 2 replicas each, instead of 1 in"
    ) in said
    assert lab[0].poprun("--add-host", "grows", "node1").returncode == 3


def test_a_training_has_the_same_bits_on_fewer_hosts_and_on_all_again(make_lab, tmp_path):
    lab = make_lab(2)
    words = ("--host", "node0:1,node1:1", "-n", "2", "--num-replicas", "4", "--grace", "2")

    def start(folder, *options, waits=()):
        folder.mkdir()
        return lab[0].start(*POPRUN, *words, *options, TRAINING, folder, 24, *waits)

    def end(process):
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        return stdout.split()[-1], stderr

    digest, _ = end(start(tmp_path / "undisturbed"))
    folder, runs = tmp_path / "disturbed", tmp_path / "runs"
    process = start(
        *(folder, "--memory-checkpoints", "--max-restarts", "1", "--output-dir", runs),
        *("--allow-fewer-hosts", "--wait-for-hosts"),
        waits=(10, 16),
    )

    def steps():
        log = folder / "log"
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    def wait_for(step, instances):
        wait_until(
            lambda: steps() and steps()[-1][:3] == [str(step), "4", str(instances)],
            60,
            f"step {step} is not reached by {instances} instances",
        )

    wait_for(10, 2)
    lab[1].link("down")
    time.sleep(1)
    lab[1].link("up")
    time.sleep(3)
    assert not (runs / "latest" / "attempt-2").exists(), "a silence of 1 s is no loss"
    lab[1].kill()
    (folder / "go-on-10").touch()
    wait_for(16, 1)
    lab.switch_on(1)
    attempts = runs / "latest"
    wait_until((attempts / "attempt-3").exists, 60, "the job does not use the host again")
    (folder / "go-on-16").touch()
    found, said = end(process)
    assert found == digest
    done = [int(step) for step, *_ in steps()]
    assert sorted(set(done)) == list(range(1, 25))
    assert len(done) - len(set(done)) <= 1, steps()
    assert steps()[-1][2] == "2"
    # The return of the host is not a failure, so one restart is enough.
    assert "restarting the job at once (restart 1 of 1)" in said
    report = json.loads((attempts / "report.json").read_text())["attempts"]
    lost, back = (each["host_change"] for each in report[1:])
    assert (lost["lost"], lost["num_instances"]) == (["node1"], 1)
    assert (back["joined"], back["num_instances"]) == (["node1"], 2)
    # The packages were imported on the host while the training went on without it.
    assert report[2]["restart"]["imports"] < 2
    # A silent host is lost after 3 s.
    times = [float(moment) for *_, moment in steps()]
    assert times[done.index(11)] - times[done.index(10)] < 30
