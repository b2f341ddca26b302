"""Inspection of the launchers of this user, despite folders of other users and invalid answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading

import pytest
from support.launcher.run_folders import view_of

from poprun_py.errors import StartError
from poprun_py.instance import control_protocol
from poprun_py.running.supervise import launcher_queries

NOBODY = 65534
STATUS = view_of(2, 5.0).to_json()


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """Return a function that answers like the launcher of a process, with any bytes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(launcher_queries, "_STATUS_SECONDS", 1.0)
    monkeypatch.setattr(launcher_queries, "_ANSWER_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:

        def made(answer, pid=0, owner=0):
            folder = tmp_path / f"poprun-{pid or os.getpid()}-{os.urandom(3).hex()}"
            folder.mkdir()
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / "control"))
            listener.listen()
            if owner:
                os.chown(folder, owner, owner)

            def serve():
                with contextlib.suppress(OSError):
                    while True:
                        with listener.accept()[0] as asked:
                            asked.recv(1000)
                            asked.sendall(answer)

            thread = threading.Thread(target=serve, daemon=True)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)

        yield made


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Hide the jobs of other tests."""
    monkeypatch.setattr(launcher_queries, "_temporary_folders", lambda _: {tmp_path})


def frame(text):
    return control_protocol.pack(
        control_protocol.STACKS, text if isinstance(text, bytes) else text.encode()
    )


def test_a_valid_answer_is_returned(launcher):
    launcher(frame(json.dumps(STATUS)))
    assert launcher_queries.ask_status(str(os.getpid())) == (STATUS, [])
    assert launcher_queries.running_jobs()[os.getpid()] == STATUS


def test_a_long_answer_arrives_in_several_frames(launcher):
    status = view_of(3000, 5.0).to_json()
    text = json.dumps(status)
    assert len(text) > control_protocol.MAX_PAYLOAD
    size = control_protocol.MAX_PAYLOAD
    launcher(b"".join(frame(text[at : at + size]) for at in range(0, len(text), size)))
    assert launcher_queries.ask_status(str(os.getpid())) == (status, [])


@pytest.mark.parametrize("answer", [
    frame(b"[" * 100_000), frame(b'{"a":' * 800 + b"1" + b"}" * 800),
    frame(b"{"), frame(b"\xff"), frame(b"[]"), frame(b"7"), frame(b'"x"'),
    frame(json.dumps({**STATUS, "instances": [{}]})), frame(json.dumps({"run_id": 7})),
    frame(json.dumps({**STATUS, "slowest": 3})), b"\0\xff\xff\xff\xff", b"Y\0\0\0\x09half",
    frame(json.dumps(STATUS)[:-1] + ', "pid": 9}'),
], ids=repr)  # fmt: skip
def test_an_invalid_answer_counts_as_no_answer(launcher, answer):
    launcher(answer)
    with pytest.raises(StartError, match=r"does not answer|has just ended") as caught:
        launcher_queries.ask_status(str(os.getpid()))
    assert len(str(caught.value)) < 400
    launcher_queries.running_jobs()


def test_the_texts_of_an_answer_are_printable(launcher):
    launcher(frame(json.dumps({**STATUS, "program": "\x1b]0;mine\x07train.py\r"})))
    status, _ = launcher_queries.ask_status(str(os.getpid()))
    assert status["program"] == "?]0;mine?train.py?"


def test_stacks_are_printable(launcher):
    launcher(frame("instance 0:\n\t\x1b[2Jmain"))
    assert launcher_queries.ask_stacks(str(os.getpid())) == "instance 0:\n\t?[2Jmain"


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        (frame('{"problem": "host b: it does not answer"}'), ": host b: it does not answer"),
        (frame(""), "has a version that cannot add hosts"),
        (frame("[]"), "has a version that cannot add hosts"),
        (frame("{"), "the launcher does not answer"),
        (b"", "the job has just ended"),
    ],
    ids=repr,
)
def test_a_host_that_is_not_added_has_a_reason(launcher, answer, part):
    launcher(answer)
    with pytest.raises(StartError) as caught:
        launcher_queries.add_host(str(os.getpid()), "b")
    assert str(caught.value).startswith(f"--add-host {os.getpid()}: ")
    assert part in str(caught.value)


def test_the_name_of_an_added_host_is_returned(launcher):
    launcher(frame('{"host": "b"}'))
    assert launcher_queries.add_host(str(os.getpid()), "b:2") == "b"


def status_of(run_id, **values):
    return frame(json.dumps({**STATUS, "run_id": run_id, **values}))


def test_a_run_is_found_by_its_name(alone, launcher, tmp_path):
    launcher(status_of("lr-3"))
    launcher(status_of("lr-4"))
    assert launcher_queries.ask_status("lr-4")[0]["run_id"] == "lr-4"
    assert launcher_queries.ask_status(str(tmp_path / "runs" / "lr-3"))[0]["run_id"] == "lr-3"
    assert '"lr-4"' in launcher_queries.ask_stacks("lr-4")


def test_the_name_of_a_run_may_be_a_number(alone, launcher):
    """A batch system's job id is a usual name of a run."""
    launcher(status_of("1"))
    assert launcher_queries.ask_status("1")[0]["run_id"] == "1"
    launcher(status_of("9" * 100))
    assert launcher_queries.ask_status("9" * 100)[0]["run_id"] == "9" * 100


@pytest.mark.parametrize("ask", [launcher_queries.ask_status, launcher_queries.ask_stacks])
def test_a_wrong_name_lists_the_running_jobs(alone, launcher, ask):
    with pytest.raises(StartError, match="; none of your jobs runs on this host"):
        ask("lr-5")
    for number in range(9):
        launcher(status_of(f"lr-{number}"))
    with pytest.raises(StartError) as caught:
        ask("lr-9")
    assert "lr-9: no such job of yours runs on this host; expected" in str(caught.value)
    assert "; running: lr-" in str(caught.value)
    assert str(caught.value).count(f" ({os.getpid()})") == 8
    assert str(caught.value).endswith(" and 1 more")


def test_two_jobs_of_one_name_are_not_confused(alone, launcher):
    launcher(status_of("twin"))
    launcher(status_of("twin"))
    with pytest.raises(StartError, match=f"2 jobs have this name. Give the .*: {os.getpid()}, "):
        launcher_queries.ask_status("twin")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_with_the_name_of_this_process_is_ignored(launcher):
    launcher(frame("lies"), owner=NOBODY)
    with pytest.raises(StartError, match="no job of yours"):
        launcher_queries.ask_stacks(str(os.getpid()))
    with pytest.raises(StartError, match="no job of yours"):
        launcher_queries.ask_status(str(os.getpid()))
    assert os.getpid() not in launcher_queries.running_jobs()
    assert launcher_queries.launcher_status(os.getpid()) is None
    launcher(frame("truth"))
    assert launcher_queries.ask_stacks(str(os.getpid())) == "truth"


@pytest.mark.parametrize("others_first", [True, False])
def test_other_folders_with_the_launchers_process_id_are_ignored(
    launcher, monkeypatch, others_first
):
    """A folder of another user, and one that a killed launcher of the same number left."""
    launcher(frame(json.dumps(STATUS)))
    ((_, own),) = launcher_queries._sockets(os.getpid())
    foreign, dead = (own.parent.with_name(f"{own.parent.name}{end}") / own.name for end in "fd")
    for path in (foreign, dead):
        path.parent.mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    is_launchers, glob = launcher_queries._is_launchers, type(own).glob

    def in_order(folder, pattern):
        return sorted(glob(folder, pattern), key=lambda path: (path == own) is others_first)

    monkeypatch.setattr(type(own), "glob", in_order)
    monkeypatch.setattr(
        launcher_queries, "_is_launchers", lambda path: path != foreign and is_launchers(path)
    )
    assert launcher_queries.launcher_status(os.getpid()) == STATUS
    assert launcher_queries.ask_status(str(os.getpid())) == (STATUS, [])
    assert launcher_queries.ask_stacks(str(os.getpid())) == json.dumps(STATUS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_root_sees_the_jobs_of_other_users(launcher):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=NOBODY) as theirs:
        launcher(frame(json.dumps(STATUS)), theirs.pid, NOBODY)
        assert launcher_queries.ask_status(str(theirs.pid)) == (STATUS, [])
        theirs.communicate()
