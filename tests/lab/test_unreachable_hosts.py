"""Hosts that cannot take part in a job: one line names the host and the fix, with exit code 3."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest
from lab.lab import Lab
from support.repository import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
VENV = Path(sys.prefix)
JOB = ["--num-instances", "2", "--num-replicas", "2"]


@pytest.fixture(scope="module")
def lab(lab_permitted, tmp_path_factory):
    """Two hosts that had a job, so that --no-check has what it needs to know."""
    with Lab(tmp_path_factory.mktemp("lab"), 2) as hosts:
        assert hosts[0].poprun("--host", hosts.names(), *JOB, "true").returncode == 0
        yield hosts


@contextlib.contextmanager
def mounted(host, *words):
    """Mount something on a host for a while; the last word is where."""
    done = host.run("mount", *words)
    assert done.returncode == 0, done.stderr
    yield
    host.run("umount", "--lazy", words[-1])


@contextlib.contextmanager
def changed(path, text):
    """Put a text in the place of a file for a while; None leaves the place empty."""
    before = path.with_name("before")
    if path.exists():
        path.rename(before)
    if text is not None:
        path.write_text(text)
    yield
    path.unlink(missing_ok=True)
    if before.exists():
        before.rename(path)


def no_key(lab):
    return changed(lab[0].ssh / "id_ed25519", None)


def unknown_host_key(lab):
    return changed(lab[0].ssh / "known_hosts", "")


def changed_host_key(lab):
    path = lab[0].ssh / "known_hosts"
    known = path.read_text().splitlines()
    return changed(path, f"{known[1].split()[0]} {' '.join(known[0].split()[1:])}\n")


def no_python(lab):
    return mounted(lab[1], "-t", "tmpfs", "tmpfs", VENV)


@contextlib.contextmanager
def no_mpi(lab):
    with contextlib.ExitStack() as stack:
        for program in ("mpirun", "prted"):
            stack.enter_context(mounted(lab[1], "--bind", "/dev/null", VENV / "bin" / program))
        yield


@contextlib.contextmanager
def other_python(lab):
    """Install a Python that claims to be older: when asked, it reads a program from its input."""
    folder = lab[1].folder / "bin"
    shutil.copytree(VENV / "bin", folder, symlinks=True)
    (folder / "python").unlink()
    code = "import sys; sys.version_info = (3, 8, 0); exec(sys.stdin.read())"
    (folder / "python").write_text(
        f"#!/bin/sh\nexec {Path(sys.executable).resolve()} -I -c '{code}'\n"
    )
    (folder / "python").chmod(0o755)
    with mounted(lab[1], "--bind", folder, VENV / "bin"):
        yield


@contextlib.contextmanager
def host_down(lab):
    lab[1].link("down")
    yield
    lab[1].link("up")


def no_sshd_port(lab):
    return changed(lab[0].ssh / "config", "Host node1\n  Port 2222\n")


def _id_of(value):
    if isinstance(value, list):
        return "unchecked" if value else "checked"
    return getattr(value, "__name__", "")


# With --no-check, mpirun is the one that fails; the words are found in the same table.
@pytest.mark.parametrize(
    ("breakage", "said", "fix", "check"),
    [
        (no_key, "ssh asks for a password", "ssh-copy-id node1", []),
        (no_key, "ssh asks for a password", "ssh-copy-id node1", ["--no-check"]),
        (unknown_host_key, "host key of the host is not known", "ssh node1", []),
        (changed_host_key, "differs from the known host key", "ssh-keygen -R node1", []),
        (no_python, "python does not run on the host", "same path", []),
        (no_python, "python does not run on the host", "same path", ["--no-check"]),
        (no_mpi, "MPI is missing on the host", "mpirun", []),
        (no_mpi, "MPI is missing on the host", "mpirun", ["--no-check"]),
        (host_down, "does not answer", "ping node1", []),
        (host_down, "does not answer", "ping node1", ["--no-check"]),
        (no_sshd_port, "no sshd listens", "-p PORT", []),
    ],
    ids=_id_of,
)
def test_a_host_that_cannot_take_part(lab, hello, breakage, said, fix, check):
    with breakage(lab):
        done = lab[0].poprun("--host", lab.names(), *JOB, *check, hello)
    assert done.returncode == 3, (done.stdout, done.stderr)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("poprun-py: error: host node1: ")
    assert said in done.stderr
    assert fix in done.stderr


def test_a_login_shell_of_another_kind_than_bournes(lab, hello, tmp_path):
    shell, passwd = tmp_path / "strict", tmp_path / "passwd"
    program = ROOT / "tests" / "poprun_py" / "machines" / "strict_shell.py"
    shell.write_text(f'#!/bin/sh\nexec {Path(sys.executable).resolve()} -I -S {program} "$@"\n')
    shell.chmod(0o755)
    passwd.write_text(f"root:x:0:0:root:/root:{shell}\nsshd:x:100:65534::/run/sshd:/bin/false\n")
    with mounted(lab[1], "--bind", passwd, "/etc/passwd"):
        done = lab[0].poprun("--host", lab.names(), *JOB, hello)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[1,{index}]<stdout>:{index} node{index} node0 node1" for index in range(2)
    ]


def test_an_unknown_name_is_refused(lab, hello):
    done = lab[0].poprun("--host", "node0,nowhere", *JOB, hello)
    assert done.returncode == 3
    assert "host nowhere: the host name cannot be resolved" in done.stderr


def test_another_python_on_one_host(lab, hello):
    with other_python(lab):
        done = lab[0].poprun("--host", lab.names(), *JOB, hello)
        table = lab[0].poprun("--host", lab.names(), *JOB, "--check", hello)
    assert done.returncode == 3
    assert "host node1: Python is 3.8.0" in done.stderr
    assert table.returncode == 3
    python = next(line for line in table.stdout.splitlines() if line.startswith("Python"))
    assert python.count("!") == 1


def test_check_gives_one_fix_for_every_red_cell(make_lab, hello, tmp_path):
    lab = make_lab(3)
    lab[1].run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm")
    lab[1].run("mount", "-t", "tmpfs", "tmpfs", tmp_path)
    lab[2].kill()
    done = lab[0].poprun("--host", lab.names(), "--num-instances", "3", "--num-replicas", "3",
                         "--check", hello)  # fmt: skip
    assert done.returncode == 3
    table, fixes = done.stdout.split("\n\n")[:2]
    assert table.count("!") == len(fixes.splitlines()) == 3
    assert "node1: the free space in /dev/shm of the host is 1 MiB; enlarge" in fixes
    assert "node1" in fixes
    assert "--sync" in fixes
    assert "node2: the host does not answer" in fixes


def test_a_host_with_too_few_descriptors_is_named(lab, hello):
    before = resource.prlimit(lab[1].init_pid, resource.RLIMIT_NOFILE)
    resource.prlimit(lab[1].init_pid, resource.RLIMIT_NOFILE, (64, before[1]))
    done = lab[0].poprun("--host", lab.names(), *JOB, hello)
    resource.prlimit(lab[1].init_pid, resource.RLIMIT_NOFILE, before)
    assert done.returncode == 3
    assert re.search(
        r"error: \d of 2 instances started, .* Host node1: a process .* may open at most 64 ",
        done.stderr,
    )
