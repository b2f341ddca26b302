"""Many instances over eight hosts: each starts on its host, and all end."""

from __future__ import annotations

import contextlib
import os
import sys

import pytest
from support.processes import wait_until

pytestmark = [pytest.mark.hosts]
HOSTS = 8
# The programs share two cores.
START_SECONDS = 150.0


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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("each", [12, pytest.param(64, marks=pytest.mark.long)])
def test_every_instance_on_eight_hosts_starts_on_its_host(
    make_lab, waiting_program, tmp_path, each
):
    lab, num_instances = make_lab(HOSTS), HOSTS * each
    program, writer = waiting_program
    screen, errors = tmp_path / "screen", tmp_path / "errors"
    poprun = (sys.executable, "-m", "poprun_py", "--host", f"node[0-{HOSTS - 1}]")
    job = lab[0].start(
        *("sh", "-c", f'exec "$@" > {screen} 2> {errors}', "sh"),  # a full pipe would hold it up
        *(*poprun, "--num-instances", num_instances, "--oversubscribe", program),
    )
    with contextlib.closing(job.stdout), contextlib.closing(job.stderr):
        try:
            wait_until(
                lambda: job.poll() is not None or _lines(screen) >= num_instances, START_SECONDS
            )
            assert job.poll() is None, errors.read_text()
        finally:
            os.close(writer)
        assert job.wait(100) == 0
    of_instance = [f"[1,{i}]<stdout>:node{i // each}" for i in range(num_instances)]
    assert sorted(screen.read_text().splitlines()) == sorted(of_instance)
    (warning,) = errors.read_text().splitlines()
    assert warning.startswith(f"poprun-py: warning: node[0-{HOSTS - 1}]: {each} instances share ")
    for host in lab.hosts:
        wait_until(lambda host=host: not host.processes("waiting_program"), 20, f"{host.name}")


def _lines(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
