"""Whoever of a job on two hosts is killed: nothing is left, or the next job there removes it."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
from support import shared_memory_program
from support.processes import wait_until

pytestmark = pytest.mark.hosts

KINDS = ("launcher", "mpirun", "ssh", "daemon", "wrapper", "program")
# Every process of the job; the wrappers and programs; the daemon; the launcher.
FEW = (KINDS, ("wrapper", "program"), ("daemon",), ("launcher",))
SUBSETS = [each for size in range(1, 7) for each in itertools.combinations(KINDS, size)]


class Hosts:
    """The processes and files of two hosts, as they are besides those that were there before."""

    def __init__(self, lab) -> None:
        self.lab = lab
        self._spaces = {_space(host.init_pid) for host in lab.hosts}
        self._before = set(self._processes())

    def _processes(self) -> dict[int, tuple[int, list[str]]]:
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 (names)
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                if _space(pid) in self._spaces and fields[0] not in b"ZX":
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                    found[int(pid)] = (int(fields[1]), words)
        return found

    def processes(self) -> dict[int, tuple[int, list[str]]]:
        return {pid: it for pid, it in self._processes().items() if pid not in self._before}

    def by_kind(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {kind: [] for kind in KINDS}
        listed = self.processes()
        for pid, (parent, words) in listed.items():
            name = Path(words[0]).name
            if name in ("mpirun", "prterun"):
                found["mpirun"].append(pid)
            elif name == "ssh":
                found["ssh"].append(pid)
            elif name == "prted":
                found["daemon"].append(pid)
            elif "poprun_py" in words:
                found["launcher"].append(pid)
            elif any(word.endswith("instance/start_wrapper.py") for word in words):
                found["wrapper"].append(pid)
            elif shared_memory_program.__file__ in words and parent in listed:
                found["program"].append(pid)
        return found

    def files(self) -> list[str]:
        return sorted(
            f"{host.name}:/{folder}/{name}"
            for host in self.lab.hosts
            for folder in ("tmp", "dev/shm")
            for name in os.listdir(f"/proc/{host.init_pid}/root/{folder}")  # noqa: PTH208
            if name.startswith(("poprun-", "prted.", "ompi.", "sm_segment", "osc_"))
            and name != "poprun-py-leases"
        )


def _space(pid) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def start(lab, notes):
    notes.mkdir()
    job = lab[0].start(
        sys.executable, "-m", "poprun_py", "--host", lab.names(), "--num-instances", "4",
        "--num-replicas", "4", "--no-check", "--share-cores", "yes",
        shared_memory_program.__file__, notes, "training",
    )  # fmt: skip
    wait_until(lambda: len(list(notes.iterdir())) == 4 or job.poll() is not None, 90)
    assert job.poll() is None, job.communicate()
    return job


def check(lab, hosts, notes, killed):
    before = hosts.files()
    job = start(lab, notes)
    found = hosts.by_kind()
    assert all(found.values()), found
    for number in (signal.SIGSTOP, signal.SIGKILL):  # at once, as far as that goes
        for pid in (pid for kind in killed for pid in found[kind]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    job.send_signal(signal.SIGCONT)  # what enters the host stops with the launcher
    _, said = job.communicate(timeout=120)
    assert job.returncode not in (0, 124)
    assert said or "launcher" in killed
    wait_until(lambda: not hosts.processes(), 60)
    if "wrapper" not in killed:
        # Whoever was left on each host has done it.
        assert hosts.files() == before
        return
    after = lab[0].poprun("--host", lab.names(), "--num-instances", "2", "--num-replicas", "2",
                          "--no-check", "--share-cores", "yes", "true")  # fmt: skip
    assert after.returncode == 0, after.stderr
    wait_until(lambda: not hosts.processes())
    assert hosts.files() == before


@pytest.fixture(scope="module")
def hosts(lab):
    return Hosts(lab)


@pytest.mark.parametrize("killed", FEW, ids=",".join)
def test_nothing_is_left_on_two_hosts(lab, hosts, tmp_path, killed):
    check(lab, hosts, tmp_path / "notes", killed)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nothing_is_left_on_two_hosts_whoever_is_killed(lab, hosts, tmp_path):
    for number, killed in enumerate(SUBSETS):
        check(lab, hosts, tmp_path / str(number), killed)


def test_a_living_job_of_another_launcher_keeps_its_folders(lab, hosts, tmp_path):
    """The next job's first instance sweeps on the other host, the launcher on its own."""
    job = start(lab, tmp_path / "notes")
    mine = hosts.files()
    assert {name.partition("/")[0] for name in mine} == {"node0:", "node1:"}
    after = lab[1].poprun("--host", "node1,node0", "--num-instances", "2", "--num-replicas", "2",
                          "--no-check", "--share-cores", "yes", "true")  # fmt: skip
    assert after.returncode == 0, after.stderr
    assert hosts.files() == mine
    seen = (tmp_path / "notes/instance-3").stat().st_mtime_ns
    wait_until(lambda: (tmp_path / "notes/instance-3").stat().st_mtime_ns > seen)
    os.kill(hosts.by_kind()["launcher"][0], signal.SIGTERM)
    job.communicate(timeout=120)
    wait_until(lambda: not hosts.processes())
    assert hosts.files() == []


def test_connections_that_the_user_keeps_open_stay_and_serve(lab, hosts, tmp_path):
    """ControlPersist's master is the user's: jobs end without it, and leave no other."""
    config = tmp_path / "config"
    config.write_text(f"Host *\n ControlMaster auto\n ControlPath {tmp_path}/m-%h\n"
                      " ControlPersist 60\n")  # fmt: skip
    options = ("--host", lab.names(), "--num-instances", "2", "--num-replicas", "2")
    try:
        for _ in range(2):
            done = lab[0].poprun(*options, "--ssh-config", config, "true")
            assert done.returncode == 0, done.stderr
            wait_until(lambda: len(hosts.by_kind()["ssh"]) <= 1)
            assert [path.name for path in tmp_path.glob("m-*")] == ["m-node1"]
    finally:
        lab[0].run("ssh", "-F", config, "-O", "exit", "node1")
    wait_until(lambda: not hosts.processes())
    assert hosts.files() == []
