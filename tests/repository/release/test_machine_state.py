"""What a run has left on the machine is found by comparing two states: fake file systems, pure."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile

import pytest

from tools import machine_state as tool

TCP = "  sl  local_address rem_address   st\n"
UNIX = "Num       RefCount Protocol Flags    Type St Inode Path\n"


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine of files, with something of each kind on it."""
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    monkeypatch.setenv("HOME", "/root")
    for folder in ("tmp/one", "dev/shm", "var/tmp", "scratch", "root/.ssh", "run/netns"):
        (tmp_path / folder).mkdir(parents=True)
    add_process(tmp_path, 7, "sleep 9", start=100)
    for path, text in {
        "proc/net/tcp": TCP + "0: 0100007F:0016 00000000:0000 0A 00\n",
        "proc/net/unix": UNIX + "0: 2 0 10000 1 1 5 /run/one\n0: 2 0 10000 1 1 6 @out of it\n",
        "proc/self/mountinfo": "20 1 0:1 / / rw shared:1 - ext4 /dev/vda rw\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "sys/class/net/lo").mkdir(parents=True)
    return tmp_path


def add_process(root, pid, words, start):
    folder = root / f"proc/{pid}"
    folder.mkdir(parents=True, exist_ok=True)
    fields = " ".join(["S", *["0"] * 18, str(start)])
    (folder / "stat").write_text(f"{pid} (a ) name) {fields} 0\n")
    (folder / "cmdline").write_bytes(words.replace(" ", "\0").encode())


def add_line(root, path, line):
    with (root / path).open("a") as file:
        file.write(line + "\n")


def test_an_unchanged_machine_has_nothing_left(root):
    before = tool.state(root)
    assert before["process"] == ["7 (started at 100): sleep 9"]
    assert before["listening socket"] == ["tcp 127.0.0.1 port 22"]
    assert before["Unix socket"] == ["/run/one"]
    assert tool.left(before, tool.state(root)) == []


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda r: (r / "tmp/two").touch(), "file", "/tmp/two"),
        (lambda r: (r / "scratch/two").mkdir(), "file", "/scratch/two"),
        (lambda r: (r / "dev/shm/sm_segment.0").touch(), "file", "/dev/shm/sm_segment.0"),
        (lambda r: (r / "var/tmp/two").touch(), "file", "/var/tmp/two"),
        (lambda r: (r / "root/.two").touch(), "home", ".two"),
        (lambda r: add_process(r, 8, "prted", 101), "process", "8 (started at 101): prted"),
        # Another process with the same id.
        (lambda r: add_process(r, 7, "prted", 102), "process", "7 (started at 102): prted"),
        (
            lambda r: add_line(r, "proc/net/tcp", "1: 00000000:0050 0:0 0A 00"),
            "listening socket",
            "tcp 0.0.0.0 port 80",
        ),
        (
            lambda r: add_line(r, "proc/net/unix", "0: 2 0 10000 1 1 7 /run/a name"),
            "Unix socket",
            "/run/a name",
        ),
        (
            lambda r: add_line(r, "proc/self/mountinfo", "21 1 0:2 / / rw - tmpfs tmpfs rw"),
            "mount",
            "/ (tmpfs, number 21)",
        ),
        (lambda r: (r / "run/netns/lab").touch(), "network namespace", "lab"),
        (lambda r: (r / "sys/class/net/port0").mkdir(), "network interface", "port0"),
    ],
)
def test_what_has_come_is_left(root, change, kind, text):
    before = tool.state(root)
    change(root)
    assert tool.left(before, tool.state(root)) == [(kind, text)]


def test_what_is_no_ones_is_not_left(root):
    before = tool.state(root)
    add_process(root, 9, "", start=103)  # a thread of the kernel
    add_line(root, "proc/net/tcp", "1: 00000000:0050 0100007F:9999 01 00")  # a connection
    (root / "root/.cache").mkdir()
    (root / "dev/shm/poprun-py-leases").mkdir()
    assert tool.left(before, tool.state(root)) == []
    assert all(len(entry) == 3 and all(entry) for entry in tool.ALLOWED)


def test_what_ends_soon_is_not_left(root, capsys):
    file = root / "tmp/state"
    looks = iter([{"process": ["1"]}, {"process": ["1", "2"]}, {"process": ["1"]}])
    assert tool.main(["snapshot", str(file)], lambda: next(looks)) == 0
    assert tool.main(["compare", str(file)], lambda: next(looks)) == 0
    assert tool.main(["compare", str(file), "--patience", "0"], lambda: {"process": ["3"]}) == 1
    assert capsys.readouterr().out == "left behind: process 3\n"


def test_this_machine_can_be_read(tmp_path, monkeypatch):
    """The same as on fakes, on the real files: what this test itself holds is found."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / "s"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as local,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
    ):
        # Popen returns in the middle of exec, where a process has no words yet.
        os.write(child.stdin.fileno(), b"\n")
        assert child.stdout.readline() == b"\n"
        local.bind(str(place))
        port = tcp.getsockname()[1]
        found = tool.state()
        child.communicate()
    assert f"tcp 127.0.0.1 port {port}" in found["listening socket"]
    assert str(place) in found["file"]
    assert str(place) in found["Unix socket"]
    assert any(line.startswith(f"{child.pid} ") for line in found["process"])
    assert any(line.startswith("/ (") for line in found["mount"])
    assert "lo" in found["network interface"]
