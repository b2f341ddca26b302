"""Hundreds of instances over eight hosts: each starts on its host, and all end."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts]
HOSTS, EACH = 8, 64
INSTANCES = HOSTS * EACH
# Of sleeping programs that share two cores: they take some fifteen seconds where nothing else runs.
START_SECONDS = 100.0


@pytest.fixture
def waiting_program(tmp_path):
    """A program that names its host and waits until the pipe's only writer closes it."""
    pipe, program = tmp_path / "pipe", tmp_path / "waiting_program.py"
    os.mkfifo(pipe)
    program.write_text(
        f"import socket\npipe = open({str(pipe)!r})\n"
        "print(socket.gethostname(), flush=True)\npipe.read()\n"
    )
    return program, os.open(pipe, os.O_RDWR)


@pytest.mark.timeout(180)
def test_512_instances_on_eight_hosts(make_lab, waiting_program, tmp_path):
    lab = make_lab(HOSTS)
    program, writer = waiting_program
    screen, errors = tmp_path / "screen", tmp_path / "errors"
    poprun = (sys.executable, "-m", "poprun_py", "--host", f"node[0-{HOSTS - 1}]")
    start = time.monotonic()
    job = lab[0].start(
        *("sh", "-c", f'exec "$@" > {screen} 2> {errors}', "sh"),  # a full pipe would hold it up
        *(*poprun, "--num-instances", INSTANCES, "--oversubscribe", program),
    )
    with contextlib.closing(job.stdout), contextlib.closing(job.stderr):
        try:
            wait_until(lambda: job.poll() is not None or _lines(screen) >= INSTANCES, START_SECONDS)
            started = time.monotonic()
            assert job.poll() is None, errors.read_text()
        finally:
            os.close(writer)
        assert job.wait(60) == 0
    print(
        f"{started - start:.1f} s to the last line, {time.monotonic() - started:.1f} s to the end"
    )
    of_instance = [f"[1,{i}]<stdout>:node{i // EACH}" for i in range(INSTANCES)]
    assert sorted(screen.read_text().splitlines()) == sorted(of_instance)
    (warning,) = errors.read_text().splitlines()
    assert warning.startswith(f"poprun-py: warning: node[0-{HOSTS - 1}]: {EACH} instances share ")
    for host in lab.hosts:
        wait_until(lambda host=host: not host.processes("waiting_program"), 20, f"{host.name}")


def _lines(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
