"""Tests of the process of a pod's server, its token file, its lock and its leases."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
from support.pod_servers import ServerProcess
from support.processes import wait_until
from support.repository import ROOT

from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.folder.pod_folders import make_pod
from popdist_py.pods.model.graphcore_systems import system_pod
from popdist_py.pods.model.pod_errors import InUseError, NotAllowedError, PodError
from popdist_py.pods.model.pod_parts import Holder, PartitionRequest
from popdist_py.pods.server.server_store import ServerStore
from poprun_py.command.pods import pod_server as serving
from poprun_py.command.pods.pod_server import LeaseExtender, serve

HOLDER = Holder(host="h", pid=1, user="u", program="p")


@pytest.fixture
def folder(tmp_path):
    return make_pod(tmp_path / "pods", system_pod("POD16", "p16"))


def client(server, folder, **more):
    return ServerStore(server.url, (folder / "token").read_text(), 20.0, **more)


def refused(capfd, *arguments, **more):
    """Return the line that a server prints when it cannot start."""
    assert serve(*arguments, **more) == 3
    stdout, stderr = capfd.readouterr()
    assert stdout == ""
    assert stderr.count("\n") == 1
    assert "Traceback" not in stderr
    return stderr


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.sweep)]
)
def test_address_and_access_log_are_printed_and_a_signal_ends_the_server(folder, number):
    with ServerProcess(folder, verbose=True) as server:
        assert server.first_line.startswith(f"serving the pod p16 at {server.url} (clients use ")
        assert f"ssh -N -L {server.port}:127.0.0.1:{server.port} " in server.first_line
        assert str(folder / "token") in server.first_line
        token = folder / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert token.read_text() not in server.first_line
        store = client(server, folder, user="ada")
        assert store.pod().name == "p16"
        store.create_partition(PartitionRequest(name="p4", size=4))
        # Neither an idle connection nor an incomplete request delays the end.
        with socket.create_connection(("127.0.0.1", server.port)) as half:
            half.sendall(b"POST /v1/attach HTTP/1.1\r\n")
            assert len(store.partitions()) == 1
            code, printed = server.end(number)
        store.close()
    assert code == 0
    assert " 127.0.0.1 ada POST /v1/create-partition 200 " in printed
    assert token.read_text().strip() not in printed


def test_signals_end_the_server_during_requests(folder):
    with ServerProcess(folder) as server:
        answered = threading.Semaphore(0)

        def ask():
            with contextlib.closing(client(server, folder)) as store, contextlib.suppress(PodError):
                while True:
                    store.partitions()
                    answered.release()

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            assert answered.acquire(timeout=20)
        # Repeated signals change nothing.
        for _ in range(3):
            server.process.send_signal(signal.SIGTERM)
        code, printed = server.end(signal.SIGTERM)
        for thread in threads:
            thread.join(20)
    assert (code, printed) == (0, "")


def test_a_lock_on_the_outer_folder_does_not_prevent_the_start(folder):
    folder.chmod(0o755)
    FolderStore(folder).close()
    assert stat.S_IMODE((folder / "holders").stat().st_mode) == 0o700
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with serving._only_server(folder), pytest.raises(InUseError), serving._only_server(folder):
        pass
    os.close(descriptor)


def test_an_address_that_cannot_be_used_is_one_line(folder, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(capfd, folder, port=port)
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another" in line
    assert "a port is a number from 0 to 65535" in refused(capfd, folder, port=70000)
    assert "cannot listen on 192.0.2.1:8090 (Cannot assign" in refused(
        capfd, folder, host="192.0.2.1"
    )
    assert "cannot listen on no host:8090" in refused(capfd, folder, host="no host")


def test_a_folder_without_a_pod_is_one_line(folder, capfd):
    assert str(folder / "no") in refused(capfd, folder / "no", port=0)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("x" * 40, 0o644, "other users can read or write"),
        ("x" * 40, 0o620, "other users can read or write"),
        ("short\n", 0o600, "does not contain a valid token"),
        ("two words, and long enough", 0o600, "does not contain a valid token"),
        ("\xe9" * 40, 0o600, "does not contain a valid token"),
        ("x" * 9999, 0o600, "does not contain a valid token"),
    ],
)
def test_invalid_token_files_are_refused(folder, capfd, text, mode, said):
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    line = refused(capfd, folder, port=0)
    assert said in line
    assert str(path) in line
    assert text.strip() not in line
    assert path.read_text() == text


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_token_file_must_be_a_regular_file(folder, capfd, make):
    make(folder / "token")
    assert "token" in refused(capfd, folder, port=0)


def test_the_token_file_must_not_be_a_link(folder, tmp_path, capfd):
    elsewhere = tmp_path / "elsewhere"
    (folder / "token").symlink_to(elsewhere)
    assert "token" in refused(capfd, folder, port=0)
    assert not elsewhere.exists()
    elsewhere.write_text("x" * 40)
    elsewhere.chmod(0o600)
    assert "Too many levels of symbolic links" in refused(capfd, folder, port=0)


@pytest.mark.sweep
def test_listening_on_other_addresses_gives_a_warning(folder):
    with ServerProcess(folder, host="0.0.0.0") as server:
        assert f" at http://{socket.gethostname()}:{server.port} (" in server.first_line
        warning = server.process.stderr.readline()
    assert "plain HTTP" in warning
    assert "a network that you trust" in warning


def seen_from_here(folder):
    with contextlib.closing(FolderStore(folder)) as store:
        return [each.ipus for each in store.attachments()]


def test_a_pod_has_one_server_and_attachments_outlive_it(folder, capfd):
    seconds = 0.8
    with ServerProcess(folder, seconds=seconds) as server:
        assert f"a server already serves the pod in {folder}: use that server, or end it" in (
            refused(capfd, folder, port=0)
        )
        mine, other = client(server, folder), client(server, folder)
        mine.create_partition(PartitionRequest(name="p4", size=4, reconfigurable=True))
        held = mine.attach("p4", 2, HOLDER)
        token = (folder / "token").read_text()
        assert server.end(signal.SIGKILL)[0] == -signal.SIGKILL
    # Without a server, leases are not renewed for longer than their duration.
    wait_for_more_than(seconds)
    assert seen_from_here(folder) == [held.ipus]
    with ServerProcess(folder, seconds=seconds, port=server.port):
        assert (folder / "token").read_text() == token
        with pytest.raises(InUseError):
            other.attach("p4", 4, HOLDER)
        # The client continues to renew its leases.
        wait_for_more_than(seconds)
        with pytest.raises(InUseError):
            other.attach("p4", 2, HOLDER, ipus=held.ipus)
        assert set(other.attach("p4", 2, HOLDER).ipus) & set(held.ipus) == set()
        mine.close()
        other.close()
        assert seen_from_here(folder) == []


def wait_for_more_than(seconds):
    later = time.monotonic() + 1.2 * seconds
    wait_until(lambda: time.monotonic() > later)


@pytest.mark.sweep
def test_leases_do_not_end_while_the_server_is_stopped(folder):
    seconds = 1.0
    with ServerProcess(folder, seconds=seconds) as server:
        mine = client(server, folder)
        mine.create_partition(PartitionRequest(name="p4", size=4))
        held = mine.attach("p4", 4, HOLDER)
        server.process.send_signal(signal.SIGSTOP)
        wait_for_more_than(seconds)
        server.process.send_signal(signal.SIGCONT)
        other = client(server, folder)
        with pytest.raises(InUseError):
            other.attach("p4", 4, HOLDER)
        assert mine._renewal._held[held.id].attachment == held
        mine.close()
        other.close()


@pytest.mark.sweep
def test_a_client_that_is_killed_frees_its_ipus_after_a_lease(folder):
    with ServerProcess(folder, seconds=0.6) as server:
        mine = client(server, folder)
        mine.create_partition(PartitionRequest(name="p4", size=4))
        code = (
            "import signal, sys; from popdist_py.pods.server.server_store import ServerStore; "
            "from popdist_py.pods.model.pod_parts import Holder; "
            "store = ServerStore(sys.argv[1], open(sys.argv[2]).read()); "
            "store.attach('p4', 4, Holder(host='h', pid=2, user='u', program='p')); "
            "print('attached', flush=True); signal.pause()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code, server.url, str(folder / "token")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        with holder:
            try:
                assert holder.stdout.readline() == "attached\n"
                # The living client holds its IPUs for longer than a lease.
                wait_for_more_than(0.6)
                with pytest.raises(InUseError):
                    mine.attach("p4", 4, HOLDER)
            finally:
                holder.kill()
        wait_until(lambda: mine.attachments() == (), limit=10)
        assert len(mine.attach("p4", 4, HOLDER).ipus) == 4
        mine.close()


@pytest.mark.sweep
def test_users_own_their_partitions(folder):
    with ServerProcess(folder) as server:
        ada, bob = client(server, folder, user="ada"), client(server, folder, user="bob")
        assert ada.create_partition(PartitionRequest(name="p4", size=4)).owner == "ada"
        with pytest.raises(NotAllowedError, match="belongs to user ada"):
            bob.remove_partition("p4")
        bob.remove_partition("p4", force=True)
        ada.close()
        bob.close()


@pytest.mark.parametrize(
    ("times", "renewed"),
    [
        ((0, 1, 2, 3, 9), 0),  # it runs, and is busy for a while
        ((0, 1, 12, 13, 14), 1),  # it was stopped for 11 s of 30
        ((0, 100, 200, 201), 2),
    ],
)
def test_all_leases_are_renewed_after_a_pause(times, renewed):
    clock = iter(times)
    calls, runs = [], []
    extender = LeaseExtender(calls.append, 30.0, note_run=runs.append, now=lambda: next(clock))
    for _ in times[1:]:
        extender.tick()
    assert calls == [30.0] * renewed
    assert runs == list(times[1:])


def test_the_server_does_not_count_as_running_before_leases_are_renewed():
    clock, runs = iter((0, 1, 20)), []

    def fail(_):
        raise PodError("the disk is full")

    extender = LeaseExtender(fail, 30.0, note_run=runs.append, now=lambda: next(clock))
    extender.tick()
    extender.tick()
    assert runs == [1]
