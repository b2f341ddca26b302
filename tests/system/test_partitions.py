"""Jobs and the partitions of a pod: made, reset, held, given back and removed, by real launches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from dataclasses import replace

import pytest
from support.launcher.partition_states import FITTING, pod_in_state
from support.listening import free_port
from support.pod_servers import ServerProcess
from support.processes import wait_until

from popdist_py.pods.model.pod_errors import UnknownNameError
from poprun_py.planning.job_partition import is_temporary

pytestmark = pytest.mark.mpi

JOB = ("-n", "2", "--num-replicas", "4", "--oversubscribe")
WAIT = "import time\nprint('up', flush=True)\ntime.sleep(60)"


@pytest.fixture
def pods(tmp_path, monkeypatch):
    """Give a function that makes this machine's only pod in a state, and returns its store."""
    monkeypatch.setenv("POPRUN_PODS", str(tmp_path / "pods"))
    with contextlib.ExitStack() as opened:

        def made(state="absent", **values):
            store = pod_in_state(tmp_path / "pods", state, **values)
            opened.callback(store.close)
            return store

        yield made


def found(store, name="p"):
    """Return a partition; None if there is none."""
    try:
        return store.partition(name)
    except UnknownNameError:
        return None


# State, options, and what is left: generation and GCDs of the partition, None if there is none.
# The same rows stand in tests/poprun_py/planning/golden/decisions.txt.
ROWS = [
    ("absent", "", 0, None),
    ("other GCDs", "--update-partition yes --remove-partition no", 0, (0, 2)),
    ("in use", "", 3, (0, 2)),
]
MORE_ROWS = [
    ("fits, preconfigured", "", 0, (1, 2)),
    ("fits, reconfigurable", "", 0, (0, 1)),
    ("too small", "", 3, (0, 2)),
    ("too small", "--update-partition yes", 0, None),
    ("PENDING", "", 0, (1, 2)),
    ("ERROR", "--reset-partition no", 3, (0, 2)),
    ("half in use, reconfigurable", "", 0, (0, 1)),
    ("other user's, other GCDs", "--update-partition yes", 3, (0, 4)),
]


@pytest.mark.parametrize(
    ("state", "options", "code", "left"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.sweep) for row in MORE_ROWS)],
)
def test_a_launch_does_what_is_decided(pods, poprun, state, options, code, left):
    store = pods(state)
    held = len(store.attachments())
    done = poprun(*JOB, "--vipu-partition", "p", *options.split(), "true")
    assert done.returncode == code, done.stderr
    partition = found(store)
    assert (partition and (partition.generation, partition.num_gcds)) == left
    assert len(store.attachments()) == held
    errors = [line for line in done.stderr.splitlines() if ": error: " in line]
    assert len(errors) == (code != 0), done.stderr


def test_instances_are_told_of_the_partition_of_their_launch_which_is_gone_afterwards(pods, poprun):
    store = pods()
    program = (
        "import os, json\n"
        "from popdist_py.pods.find_pod import find_pod\n"
        "store = find_pod(None, os.environ)\n"
        "names = ('PARTITION_ID', 'GCD_ID')\n"
        "told = {n: os.environ.get('IPUOF_VIPU_API_' + n) for n in names}\n"
        "told |= {'device': os.environ.get('POPDIST_NODE_DEVICE_ID')}\n"
        "(held,) = store.attachments()\n"
        "told |= {'held': held.ipus, 'program': held.holder.program}\n"
        "print(json.dumps(told))\n"
    )
    done = poprun(*JOB, sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition(":")[2] for line in done.stdout.splitlines())
    for index, told in enumerate(json.loads(line) for line in lines):
        assert is_temporary(told["PARTITION_ID"])
        assert (told["GCD_ID"], told["device"]) == (str(index), None)
        assert told["held"] == [0, 1, 2, 3]
    assert store.partitions() == ()


def test_a_killed_launch_holds_nothing_and_the_next_one_removes_what_it_made(pods, poprun):
    store = pods()
    running = poprun(*JOB, sys.executable, "-c", WAIT, start=True)
    wait_until(lambda: len(store.attachments()) == 1)
    (own,) = store.partitions()
    assert is_temporary(own.name)
    running.kill()
    running.wait()
    # A process that it was about to start has what it held, until it is another program.
    wait_until(lambda: store.attachments() == ())
    assert store.partitions() == (own,)
    done = poprun("-v", "true")
    assert done.returncode == 0, done.stderr
    assert f"removed partition {own.name}, whose launcher is no longer running" in done.stderr
    assert store.partitions() == ()


def test_a_signal_gives_everything_back(pods, poprun):
    store = pods()
    running = poprun(*JOB, "--vipu-partition", "p", sys.executable, "-c", WAIT, start=True)
    wait_until(lambda: len(store.attachments()) == 1)
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=60)
    assert running.returncode == 143
    assert store.partitions() == ()
    assert store.attachments() == ()


@pytest.mark.sweep
def test_a_signal_while_a_partition_is_awaited_removes_it(pods, poprun):
    store = pods(create_seconds=60.0)
    running = poprun(*JOB, "--vipu-partition", "p", "true", start=True)
    wait_until(lambda: found(store) is not None)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 143
    assert "Traceback" not in errors
    assert store.partitions() == ()


@pytest.mark.sweep
def test_a_restart_keeps_the_partition_and_a_failure_gives_it_back(pods, poprun):
    store = pods()
    program = (
        "import os\n"
        "from popdist_py.pods.find_pod import find_pod\n"
        "(p,) = find_pod(None, os.environ).partitions()\n"
        "print(p.name, p.created)\n"
        "raise SystemExit(7)\n"
    )
    done = poprun("--max-restarts", "1", sys.executable, "-c", program)
    assert done.returncode == 7
    first, second = (line.partition(":")[2] for line in done.stdout.splitlines())
    assert first == second
    assert store.partitions() == ()


def test_what_is_only_looked_at_changes_nothing(pods, look, tmp_path):
    store = pods("fits, preconfigured")
    plan = tmp_path / "plan.json"
    done = look("-v", *JOB, "--dry-run", "--export-plan", str(plan), "true")
    assert done.returncode == 0, done.stderr
    assert "partition p of " in done.stderr
    assert (
        " is reset and used (the only partition of the pod fits the job), and stays"
    ) in done.stderr
    assert found(store).generation == 0
    assert json.loads(plan.read_text())["partition"]["action"] == "reset"


@pytest.mark.sweep
def test_a_saved_plan_uses_the_partition_when_it_runs(pods, poprun, tmp_path):
    store = pods("fits, preconfigured")
    plan = tmp_path / "plan.json"
    assert poprun(*JOB, "--export-plan", str(plan), "true").returncode == 0
    assert found(store).generation == 0
    assert poprun("--from-plan", str(plan)).returncode == 0
    assert found(store).generation == 1
    store.remove_partition("p")
    store.create_partition(replace(FITTING, num_gcds=4))
    done = poprun("--from-plan", str(plan))
    assert done.returncode == 3
    assert "partition p does not fit" in done.stderr


def test_a_server_that_is_not_there_is_one_line(look, tmp_path):
    port = free_port()
    token = tmp_path / "token"
    token.write_text("x" * 40)
    token.chmod(0o600)
    done = look(
        "--pod", f"http://127.0.0.1:{port}", "true", env={"POPRUN_POD_TOKEN_FILE": str(token)}
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert f"127.0.0.1:{port}" in line


@pytest.mark.sweep
def test_a_job_outlives_the_server_of_its_pod(pods, poprun, tmp_path):
    store = pods()
    folder = tmp_path / "pods" / "pod16"
    go = tmp_path / "go"
    program = (
        "import os, pathlib, time\n"
        "print(os.environ['IPUOF_VIPU_API_HOST'], os.environ['IPUOF_VIPU_API_PORT'], flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
    )
    with ServerProcess(folder) as server:
        words = ("--pod", server.url, "--vipu-partition", "p", "--vipu-server-timeout", "5")
        env = {"POPRUN_POD_TOKEN_FILE": str(folder / "token"), "POPRUN_PODS": ""}
        running = poprun(*words, sys.executable, "-c", program, start=True, env=env)
        wait_until(lambda: len(store.attachments()) == 1)
        assert running.stdout.readline().endswith(f":127.0.0.1 {server.port}\n")
        server.process.kill()
        server.process.wait()
        go.touch()
        _, errors = running.communicate(timeout=60)
        assert running.returncode == 0
        (line,) = errors.splitlines()
        assert "warning: the IPUs of this job cannot be released: " in line
        assert f"127.0.0.1:{server.port}" in line
        assert "partition p may remain" in line
        done = poprun(*words, "true", env=env)
        assert done.returncode == 3
        (line,) = done.stderr.splitlines()
        assert f"127.0.0.1:{server.port}" in line


def test_offline_and_none_ask_no_pod(pods, poprun):
    store = pods("in use")
    for words in (("--offline-mode", "yes"), ("--pod", "none")):
        done = poprun(*JOB, *words, "sh", "-c", "echo $POPRUN_POD")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("none") == 2
    assert found(store).generation == 0
    assert os.environ.get("POPRUN_POD") is None


@pytest.fixture
def taken(pods, poprun, tmp_path, monkeypatch):
    """Give a pod of which another job has all IPUs, but no cores, and what ends that."""
    store = pods()
    monkeypatch.setenv("POPRUN_LEASES", str(tmp_path / "leases"))
    running = poprun(
        *("-n", "1", "--num-replicas", "16"),
        *(sys.executable, "-c", WAIT),
        start=True,
        env={"POPRUN_LEASES": "none"},
    )
    wait_until(lambda: len(store.attachments()) == 1)

    def end():
        running.terminate()
        running.communicate(timeout=60)

    yield store, running.pid, end
    end()


def test_a_job_waits_for_ipus_and_has_its_cores_first(taken, poprun, tmp_path):
    store, pid, end = taken
    refused = poprun("true")
    assert refused.returncode == 3
    (line,) = (each for each in refused.stderr.splitlines() if ": error: " in each)
    assert "error: use fewer IPUs, or wait with --wait-for-resources: the job needs 1 IPU; " in line
    assert line.endswith(f"(process {pid} on {socket.gethostname()}))")
    waiting = poprun("--wait-for-resources=1m", "echo", "up", start=True)
    told = waiting.stderr.readline()
    assert "waiting for IPUs: the job needs 1 IPU; " in told
    (lease,) = (tmp_path / "leases").glob("lease-*")
    assert json.loads(lease.read_text())["pid"] == waiting.pid
    end()
    output, errors = waiting.communicate(timeout=60)
    assert (waiting.returncode, output) == (0, "[1,0]<stdout>:up\n"), errors
    assert "not launched" not in told + errors
    assert store.partitions() == store.attachments() == ()


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_ipus(taken, poprun, number):
    store, _, _ = taken
    before = store.partitions(), store.attachments()
    waiting = poprun("--wait-for-resources", "true", start=True)
    while "waiting for IPUs" not in waiting.stderr.readline():
        assert waiting.poll() is None
    waiting.send_signal(number)
    _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 128 + number
    assert "Traceback" not in errors
    assert (store.partitions(), store.attachments()) == before


@pytest.mark.sweep
def test_the_wait_for_ipus_has_an_end(taken, poprun):
    done = poprun("--wait-for-resources=0.5", "true")
    assert done.returncode == 3
    assert ", or wait longer with --wait-for-resources: the job needs 1 IPU; " in done.stderr
    assert done.stderr.endswith(" (the time of --wait-for-resources 0.5 is over)\n")


@pytest.mark.sweep
def test_a_launch_within_an_instance_runs_on_its_ipus(pods, poprun):
    store = pods()
    launcher = f"{sys.executable} -m poprun_py"
    inner = "echo $IPUOF_VIPU_API_PARTITION_ID,$IPUOF_VIPU_API_GCD_ID"
    done = poprun(*JOB, "--vipu-partition", "p", "sh", "-c", f"{launcher} sh -c '{inner}'")
    assert done.returncode == 0, done.stderr
    told = sorted(line.rpartition(":")[2] for line in done.stdout.splitlines())
    assert told == ["p,0", "p,1"]
    assert store.partitions() == ()
