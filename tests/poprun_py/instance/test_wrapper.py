"""The wrapper in front of a program when words of the launcher come early, or it is stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import wait_until
from support.repository import ROOT

from poprun_py.instance import control_protocol
from poprun_py.instance.wrapper import LEAVE_SECONDS
from poprun_py.machines.leases import list_for_launcher, parse_other_jobs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_that_comes_together_with_the_start_is_obeyed(tmp_path, number):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "control"))
    listener.listen()
    wrapper = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            ROOT / "poprun_py" / "instance" / "start_wrapper.py",
            "--",
            "sleep",
            "1000",
        ],
        env={**os.environ, "POPRUN_CONTROL": f"unix:{tmp_path}/control", "RANK": "1"},
    )
    try:
        channel = listener.accept()[0]
        channel.settimeout(60)
        go = json.dumps({"variables": {}}).encode()
        channel.sendall(
            control_protocol.pack(control_protocol.GO, go)
            + control_protocol.pack(control_protocol.STOP, b"[100, %d]" % number)
        )
        died = next(
            value for kind, value in messages(channel) if kind == control_protocol.PROGRAM_ENDED
        )
        assert (died["code"], died["stopped"]) == (-number, True)
        channel.close()
        wrapper.wait(60)
    finally:
        wrapper.kill()
        wrapper.wait()
        listener.close()


@pytest.mark.parametrize("code", [0, 75])
def test_what_a_program_leaves_when_it_ends_well_has_the_grace_time(tmp_path, code):
    end = tmp_path / "end"
    os.mkfifo(end)
    with wrapper_of(tmp_path, f"(read line < {end}; echo done) & exit {code}") as channel:
        go = json.dumps({"variables": {}, "grace_seconds": 1000}).encode()
        channel.sendall(control_protocol.pack(control_protocol.GO, go))
        frames = []
        for kind, payload in raw_messages(channel):
            frames.append((kind, payload))
            if kind == control_protocol.PROGRAM_ENDED:
                end.write_text("\n")
            if kind == control_protocol.INSTANCE_ENDED:
                break
    assert (control_protocol.STDOUT, b"done\n") in frames
    assert control_protocol.LEFTOVERS not in [kind for kind, _ in frames]


def test_what_a_program_leaves_for_longer_than_the_grace_time_is_killed_and_told(tmp_path):
    with wrapper_of(tmp_path, "sleep 1000 & exit 0") as channel:
        go = json.dumps({"variables": {}, "grace_seconds": 0.1}).encode()
        channel.sendall(control_protocol.pack(control_protocol.GO, go))
        frames = []
        for kind, payload in raw_messages(channel):
            frames.append((kind, payload))
            if kind == control_protocol.INSTANCE_ENDED:
                break
    [told] = [json.loads(payload) for kind, payload in frames if kind == control_protocol.LEFTOVERS]
    [(pid, command)] = told
    assert command == "sleep 1000"
    assert not Path(f"/proc/{pid}").exists()


def test_a_program_that_failed_leaves_nothing_for_the_grace_time(tmp_path):
    with wrapper_of(tmp_path, "sleep 1000 & exit 3") as channel:
        go = json.dumps({"variables": {}, "grace_seconds": 1000}).encode()
        channel.sendall(control_protocol.pack(control_protocol.GO, go))
        kinds = []
        for kind, _ in raw_messages(channel):
            kinds.append(kind)
            if kind == control_protocol.INSTANCE_ENDED:
                break
    assert control_protocol.LEFTOVERS not in kinds


def test_open_mpi_sees_that_an_instance_has_ended_while_others_run(tmp_path):
    """It then ends those, if the program called MPI_Init and not MPI_Finalize."""
    with wrapper_of(tmp_path, "exit 0", PMIX_RANK="1") as channel:
        channel.sendall(control_protocol.pack(control_protocol.GO, b'{"variables": {}}'))
        began = time.monotonic()
        # The wrapper closes the channel although the launcher has not let go of it.
        assert [kind for kind, _ in raw_messages(channel)][-1] == control_protocol.INSTANCE_ENDED
    assert time.monotonic() - began >= LEAVE_SECONDS


@contextlib.contextmanager
def wrapper_of(folder, script, **environ):
    """Run the wrapper of a shell script; gives the launcher's end of its channel."""
    main = ROOT / "poprun_py" / "instance" / "start_wrapper.py"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control"))
        listener.listen()
        wrapper = subprocess.Popen(
            [sys.executable, "-I", "-S", main, "--", "sh", "-c", script],
            env={**os.environ, **environ, "POPRUN_CONTROL": f"unix:{folder}/control", "RANK": "1"},
        )
        try:
            with listener.accept()[0] as channel:
                channel.settimeout(60)
                yield channel
            wrapper.wait(60)
        finally:
            wrapper.kill()
            wrapper.wait()


def raw_messages(channel):
    reader = control_protocol.Reader()
    while data := channel.recv(1 << 16):
        yield from reader.feed(data)


def messages(channel):
    reader = control_protocol.Reader()
    while data := channel.recv(1 << 16):
        for kind, payload in reader.feed(data):
            yield kind, json.loads(payload)


def test_cpus_are_leased_before_the_program_starts_and_until_the_wrapper_is_gone(tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "control"))
    listener.listen()
    cpu = min(os.sched_getaffinity(0))
    request = {"cpus": [cpu, 4000], "numa_nodes": [0], "program": "p", "run_id": "r",
               "may_share": False, "within": ""}  # fmt: skip
    environ = {"POPRUN_LEASES": str(tmp_path / "leases")}
    wrapper = subprocess.Popen(
        [sys.executable, "-I", "-S", ROOT / "poprun_py" / "instance" / "start_wrapper.py", "--",
         "sleep", "1000"],
        env={**os.environ, **environ, "POPRUN_CONTROL": f"unix:{tmp_path}/control", "RANK": "1"},
    )  # fmt: skip
    try:
        channel = listener.accept()[0]
        channel.settimeout(60)
        frames = messages(channel)
        channel.sendall(control_protocol.pack(control_protocol.LEASE, json.dumps(request).encode()))
        assert next(value for kind, value in frames if kind == control_protocol.LEASED) == {}
        assert [each.cpus for each in parse_other_jobs(list_for_launcher(environ), "").leases] == [
            (cpu,)
        ]
        channel.sendall(
            control_protocol.pack(control_protocol.GO, json.dumps({"variables": {}}).encode())
        )
        program = next(value["pid"] for kind, value in frames if kind == control_protocol.STARTED)
        files = [str(file.readlink()) for file in Path(f"/proc/{program}/fd").iterdir()]
        assert files
        assert not [name for name in files if "lease" in name]
        wrapper.kill()
        wrapper.wait()
        assert list_for_launcher(environ) == []
        channel.close()
    finally:
        wrapper.kill()
        wrapper.wait()
        listener.close()


@pytest.mark.mpi
def test_job_ends_although_a_wrapper_is_stopped(poprun, script):
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
@pytest.mark.soak  # mpirun kills the wrappers a quarter of a second after it has warned them
def test_nothing_outlives_a_killed_launcher(poprun, script):
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
def test_launcher_that_was_stopped_itself_blames_nobody(poprun, script, tmp_path):
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
def test_an_exception_that_a_thread_outlives_ends_the_job(poprun, script):
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
    assert (
        "(--grace) after the exception that ended its main thread, the program was" in done.stderr
    )
    assert "instance 1 (replica 1) " in done.stderr
    assert " failed first: exit code 1\n" in done.stderr
