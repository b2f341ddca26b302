"""The wrapper of a program: start, processes that a program leaves, leases, exceptions."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import wait_until
from support.wrapper import frames, wrapped

from poprun_py import process_info
from poprun_py.instance import control_protocol
from poprun_py.instance.job_folders import folder_name
from poprun_py.instance.program_process import ProgramProcess
from poprun_py.instance.wrapper import LEAVE_SECONDS
from poprun_py.machines.remote_leases import list_for_launcher, parse_other_jobs

GO = {"variables": {}}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_arrives_together_with_the_start_is_obeyed(tmp_path, number):
    with wrapped(tmp_path, "sleep", "1000") as (channel, wrapper):
        channel.sendall(
            message(control_protocol.GO, GO) + message(control_protocol.STOP, [100, number])
        )
        received = values(channel)
        end = next(value for kind, value in received if kind == control_protocol.PROGRAM_ENDED)
        assert (end["code"], end["stopped"]) == (-number, True)
        channel.close()
        wrapper.wait(60)


def test_a_second_stop_sends_no_signal_but_can_shorten_the_grace_time(tmp_path):
    script = "trap 'echo asked' TERM; echo ready; while :; do sleep 0.01; done"
    received = b""
    with wrapped(tmp_path, "sh", "-c", script) as (channel, _):
        channel.sendall(message(control_protocol.GO, GO))
        for kind, payload in until_end(channel):
            if kind == control_protocol.STDOUT:
                received += payload
                if payload == b"ready\n":
                    channel.sendall(message(control_protocol.STOP, [1000, signal.SIGTERM]))
                else:
                    for seconds in (1000, 0.1, 1000):
                        channel.sendall(message(control_protocol.STOP, [seconds, signal.SIGTERM]))
            elif kind == control_protocol.PROGRAM_ENDED:
                assert json.loads(payload)["code"] == -signal.SIGKILL
    assert received == b"ready\nasked\n"


def test_processes_of_a_program_are_killed_again_until_none_is_left(monkeypatch):
    rounds = []
    monkeypatch.setattr(process_info, "descendants", lambda _: rounds.append(1) or [])
    program = ProgramProcess(["program"], SimpleNamespace(send_bytes=None))
    program.record_end(0)
    for _ in range(3):
        program.on_time(program.next_deadline())
    assert len(rounds) == 3


@pytest.mark.parametrize("code", [0, 75])
def test_processes_left_by_a_program_that_ended_well_have_the_grace_time(tmp_path, code):
    end = tmp_path / "end"
    os.mkfifo(end)
    script = f"(read line < {end}; echo done) & exit {code}"
    received = []
    with wrapped(tmp_path, "sh", "-c", script) as (channel, _):
        channel.sendall(message(control_protocol.GO, {**GO, "grace_seconds": 1000}))
        for kind, payload in until_end(channel):
            received.append((kind, payload))
            if kind == control_protocol.PROGRAM_ENDED:
                end.write_text("\n")
    assert (control_protocol.STDOUT, b"done\n") in received
    assert control_protocol.LEFTOVERS not in dict(received)


def test_processes_left_for_longer_than_the_grace_time_are_killed_and_reported(tmp_path):
    with wrapped(tmp_path, "sh", "-c", "sleep 1000 & exit 0") as (channel, _):
        channel.sendall(message(control_protocol.GO, {**GO, "grace_seconds": 0.1}))
        received = dict(until_end(channel))
    [(pid, command)] = json.loads(received[control_protocol.LEFTOVERS])
    assert command == "sleep 1000"
    assert not Path(f"/proc/{pid}").exists()


def test_processes_left_by_a_failed_program_are_killed_at_once(tmp_path):
    with wrapped(tmp_path, "sh", "-c", "sleep 1000 & exit 3") as (channel, _):
        channel.sendall(message(control_protocol.GO, {**GO, "grace_seconds": 1000}))
        assert control_protocol.LEFTOVERS not in dict(until_end(channel))


@pytest.mark.parametrize("variables", [{}, {"POPDIST_MEMORY_CHECKPOINTS": "1"}])
def test_the_wrapper_of_an_ended_program_ends_although_other_instances_run(tmp_path, variables):
    """Open MPI then ends the others, if the program called MPI_Init but not MPI_Finalize."""
    # With checkpoints in memory, the program's start hook tells that the program has started MPI.
    tell = "printf '\\001' | dd of=$POPDIST_HEARTBEAT bs=1 seek=240 conv=notrunc 2>&1"
    with wrapped(tmp_path, "sh", "-c", tell, PMIX_RANK="1", **variables) as (channel, _):
        channel.sendall(message(control_protocol.GO, GO))
        began = time.monotonic()
        # The wrapper closes the channel before the launcher sends BYE.
        assert [kind for kind, _ in frames(channel)][-1] == control_protocol.INSTANCE_ENDED
    assert time.monotonic() - began >= LEAVE_SECONDS


@pytest.mark.parametrize("grace_seconds", [0, 1000])
def test_a_wrapper_that_waits_for_other_instances_sleeps(tmp_path, grace_seconds):
    with wrapped(tmp_path, "true") as (channel, wrapper):
        channel.sendall(message(control_protocol.GO, {**GO, "grace_seconds": grace_seconds}))
        list(until_end(channel))
        before = wake_ups(wrapper.pid)
        time.sleep(0.5)
        assert wake_ups(wrapper.pid) - before <= 1  # the first goes to sleep


@pytest.mark.parametrize(
    ("kind", "value", "is_kept"),
    [
        (control_protocol.STOP, [0, signal.SIGTERM], True),
        (control_protocol.BYE, True, True),
        (control_protocol.BYE, False, False),
    ],
    ids=["stopped", "restarted", "ended"],
)
def test_states_outlive_a_wrapper_whose_next_program_could_not_start(
    tmp_path, kind, value, is_kept
):
    states = tmp_path / folder_name("states")
    states.mkdir(mode=0o700)
    start = {"variables": {"POPDIST_CHECKPOINT_MEMORY": str(states)}}
    with wrapped(tmp_path, "true") as (channel, wrapper):
        channel.sendall(message(control_protocol.GO, start))
        list(until_end(channel))
        channel.sendall(message(control_protocol.NEXT, None) + message(kind, value))
        wrapper.wait(60)
    assert states.exists() is is_kept


# --- a spare before the first program -----------------------------------------------------------

TELLS_FORK = """\
import sys
is_forked = "fractions" in sys.modules
import fractions
if __name__ == "__main__":
    print(is_forked, flush=True)
"""


def starts_after_preparing(folder, *command, waits=True):
    """Return whether a wrapper has made a spare, and the output of the program that follows."""
    with wrapped(folder, *command) as (channel, _):
        channel.sendall(message(control_protocol.PREPARE, GO))
        prepared, output, is_started = None, b"", not waits
        if is_started:
            time.sleep(0.2)  # the spare imports torch
            channel.sendall(message(control_protocol.GO, GO))
        for kind, payload in until_end(channel):
            if kind == control_protocol.PREPARED:
                prepared = json.loads(payload)
                if not is_started:
                    channel.sendall(message(control_protocol.GO, GO))
            elif kind == control_protocol.STDOUT:
                output += payload
        return prepared, output


def test_a_wrapper_forks_its_first_program_from_a_spare(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(TELLS_FORK)
    assert starts_after_preparing(tmp_path, sys.executable, str(program)) == (True, b"True\n")


def test_a_spare_has_the_memory_policy_of_its_programs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import fractions")
    start = {"variables": {"POPRUN_MEMORY_NODES": "0"}}
    found = []
    for prepares in (False, True):
        folder = tmp_path / str(prepares)
        folder.mkdir()
        with wrapped(folder, sys.executable, str(program)) as (channel, _):
            received = values(channel)
            if prepares:
                channel.sendall(message(control_protocol.PREPARE, start))
                assert next(value for kind, value in received if kind == control_protocol.PREPARED)
            channel.sendall(message(control_protocol.GO, start))
            value = next(value for kind, value in received if kind == control_protocol.STARTED)
            found.append((value["found"]["memory_policy"], value["found"]["memory_nodes"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("text", ["print('ran')", "import no_such_module\nprint('ran')"])
def test_a_program_that_cannot_have_a_spare_runs_only_after_its_start(tmp_path, text):
    program = tmp_path / "program.py"
    program.write_text(text)
    prepared, output = starts_after_preparing(tmp_path, sys.executable, str(program))
    assert (prepared, output) == (False, b"" if "no_such" in text else b"ran\n")


def test_a_python_without_the_hook_does_not_run_the_program_too_early(tmp_path):
    python, program = tmp_path / "python", tmp_path / "program.py"
    python.write_text(f'#!/bin/sh\nexec env -u PYTHONPATH {sys.executable} "$@"\n')
    python.chmod(0o755)
    program.write_text(f"open({str(tmp_path / 'runs')!r}, 'a').write('run ')")
    assert starts_after_preparing(tmp_path, str(python), str(program)) == (False, b"")
    assert (tmp_path / "runs").read_text() == "run "


def test_the_start_of_the_program_does_not_wait_for_the_spare(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"import torch\n{TELLS_FORK}")
    command = (sys.executable, str(program))
    assert starts_after_preparing(tmp_path, *command, waits=False) == (False, b"False\n")


def wake_ups(pid):
    """Return how often a process has gone to sleep so far."""
    return int(process_info.read_fields(pid, "status")["voluntary_ctxt_switches"])


def message(kind, value):
    return control_protocol.pack(kind, json.dumps(value).encode())


def values(channel):
    """Yield the kind and the JSON value of each message."""
    for kind, payload in frames(channel):
        yield kind, json.loads(payload)


def until_end(channel):
    """Yield the messages until all of the instance has ended."""
    for kind, payload in frames(channel):
        yield kind, payload
        if kind == control_protocol.INSTANCE_ENDED:
            return


def test_cpus_are_leased_before_the_program_starts_and_until_the_wrapper_ends(tmp_path):
    cpu = min(os.sched_getaffinity(0))
    request = {"cpus": [cpu, 4000], "numa_nodes": [0], "program": "p", "run_id": "r",
               "sharing": [False, False], "is_shareable": False, "within": ""}  # fmt: skip
    environ = {"POPRUN_LEASES": str(tmp_path / "leases")}
    with wrapped(tmp_path, "sleep", "1000", **environ) as (channel, wrapper):
        received = values(channel)
        channel.sendall(message(control_protocol.LEASE, request))
        assert next(value for kind, value in received if kind == control_protocol.LEASED) == {}
        leases = parse_other_jobs(list_for_launcher(environ), "").leases
        assert [each.cpus for each in leases] == [(cpu,)]
        channel.sendall(message(control_protocol.GO, GO))
        start = next(value for kind, value in received if kind == control_protocol.STARTED)
        files = open_files(start["pid"])
        assert files
        assert not [name for name in files if "lease" in name]
        wrapper.kill()
        wrapper.wait()
        wait_until(lambda: list_for_launcher(environ) == [], 30)


def open_files(pid):
    """Return the names of the files that a process has open."""
    names = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(
            FileNotFoundError
        ):  # a program opens and closes files as it starts
            names.append(str(file.readlink()))
    return names


@pytest.mark.mpi
def test_a_job_ends_although_a_wrapper_is_suspended(poprun, script):
    program = script(
        "import os, time\n"
        "print('wrapper', os.getppid(), flush=True)\n"
        "time.sleep(1000)\n"
    )  # fmt: skip
    job = poprun("--num-instances", 2, "--num-replicas", 2, program, start=True)
    words = [job.stdout.readline().split() for _ in range(2)]
    os.kill(int(words[1][-1]), signal.SIGSTOP)
    job.send_signal(signal.SIGINT)
    job.communicate(timeout=60)
    assert job.returncode == 130


@pytest.mark.mpi
@pytest.mark.soak  # mpirun sends SIGTERM to the wrappers, and a quarter of a second later SIGKILL
def test_no_process_outlives_a_killed_launcher(poprun, script):
    program = script(
        "import signal, subprocess, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "print('ready', flush=True)\n"
        "time.sleep(1000)\n"
    )
    job = poprun("--num-instances", 2, "--num-replicas", 2, program, start=True)
    for _ in range(2):
        assert "ready" in job.stdout.readline()
    job.kill()
    wait_until(lambda: not poprun.survivors())


@pytest.mark.mpi
@pytest.mark.soak
def test_a_launcher_that_was_suspended_reports_no_hang(poprun, script, tmp_path):
    program = script(
        "import time\n"
        "from pathlib import Path\n"
        "from popdist_py import heartbeat\n"
        "heartbeat.begin()\n"
        "for step in range(100_000):\n"
        "    heartbeat.step()\n"
        "    Path('steps').write_text(str(step))\n"
        "    if Path('enough').exists(): break\n"
        "    time.sleep(0.01)\n"
    )
    job = poprun("--hang-timeout", "2", program, start=True)
    seen = tmp_path / "steps"
    wait_until(lambda: seen.exists() and int(seen.read_text() or 0) > 100)
    job.send_signal(signal.SIGSTOP)
    began = int(seen.read_text() or 0)
    wait_until(lambda: int(seen.read_text() or 0) > began + 400, 60)
    job.send_signal(signal.SIGCONT)
    began = int(seen.read_text() or 0)
    wait_until(lambda: int(seen.read_text() or 0) > began + 50)
    (tmp_path / "enough").touch()
    _, stderr = job.communicate(timeout=60)
    assert job.returncode == 0, stderr


@pytest.mark.mpi
def test_an_exception_ends_the_job_although_a_thread_goes_on(poprun, script):
    program = script(
        "import os, threading, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "    raise ValueError('the loss is not a number')\n"
        "time.sleep(1000)\n"
    )
    done = poprun("--num-instances", 2, "--num-replicas", 2, "--grace", 0.2, program)
    assert done.returncode == 1
    assert "ValueError: the loss is not a number\n" in done.stderr
    assert "(--grace) after the exception that ended its main thread: it was" in done.stderr
    assert "instance 1 (replica 1) " in done.stderr
    assert " failed first: exit code 1\n" in done.stderr
