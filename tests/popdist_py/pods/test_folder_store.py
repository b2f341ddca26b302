"""The pod in a folder: the contract, and what only files and processes of one machine can do."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.damage import damaged
from support.pod_contract import POD16, PodContract, holder
from support.processes import wait_until
from support.repository import ROOT

from popdist_py.pods.folder import pod_database
from popdist_py.pods.folder.file_names import POD_FILE
from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.folder.pod_file import format_pod
from popdist_py.pods.folder.pod_folders import make_pod
from popdist_py.pods.model.pod_errors import DamagedError, InUseError, PodError, UnknownNameError
from popdist_py.pods.model.pod_parts import PartitionRequest, PartitionState


@pytest.fixture
def opened(tmp_path):
    stores = []

    def make(pod):
        folder = make_pod(tmp_path, pod)

        def open_as(user):
            stores.append(FolderStore(folder, user=user))
            return stores[-1]

        return open_as

    yield make
    for store in stores:
        store.close()


class TestFolderStore(PodContract):
    """The contract over a folder."""


@pytest.fixture
def folder(tmp_path):
    return make_pod(tmp_path, POD16)


@pytest.fixture
def store(folder):
    with closing(FolderStore(folder, user="alice")) as store:
        yield store


def _ask(name="p", size=4):
    return PartitionRequest(name=name, size=size)


def _program(code, *words, **more):
    start = (
        "import sys, pathlib, os, time\n"
        "from popdist_py.pods.folder.folder_store import FolderStore\n"
        "from popdist_py.pods.model.pod_parts import Holder, PartitionRequest\n"
        "store = FolderStore(pathlib.Path(sys.argv[1]), user='alice')\n"
        "me = Holder(host='h1', pid=os.getpid(), user='alice', program='held.py')\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", start + code, *map(str, words)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, **more,
    )  # fmt: skip


def test_a_killed_holder_is_gone_at_once(folder, store):
    store.create_partition(_ask())
    code = "store.attach('p', 4, me)\nprint('held', flush=True)\nsys.stdin.read()"
    with _program(code, folder) as process:
        assert process.stdout.readline() == "held\n", process.stderr.read()
        with pytest.raises(InUseError, match=f"process {process.pid}"):
            store.attach("p", 1, holder())
        process.kill()
        process.wait()
        assert store.attachments() == ()
    assert store.attach("p", 4, holder()).ipus == (0, 1, 2, 3)


def test_a_forked_process_and_a_started_one_hold_nothing(folder, store):
    store.create_partition(_ask())
    code = (
        "import subprocess\n"
        "store.attach('p', 4, me)\n"
        "subprocess.Popen(['sleep', '60'])\n"
        "if os.fork() == 0:\n"
        "    assert len(store.attachments()) == 1\n"
        "    store.close()\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "sys.stdin.read()"
    )
    with _program(code, folder, start_new_session=True) as process:
        try:
            assert process.stdout.readline().strip().isdigit()
            assert len(store.attachments()) == 1  # the child closed its copy, not the parent's
            process.kill()
            process.wait()
            assert store.attachments() == ()
        finally:
            os.killpg(process.pid, 9)


def test_views_for_other_users_share_one_store(store):
    bob = store.with_user("bob")
    assert bob.create_partition(_ask()).owner == "bob"
    assert store.user == "alice"
    bob.attach("p", 4, holder())
    store.close()
    assert bob.attachments() == ()
    with pytest.raises(PodError, match="closed"):
        bob.attach("p", 4, holder())


def test_threads_share_a_store(store):
    store.create_partition(_ask("p", 16))
    got, threads = [], []
    for _ in range(8):
        threads.append(threading.Thread(target=lambda: got.append(store.attach("p", 2, holder()))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert sorted(ipu for each in got for ipu in each.ipus) == list(range(16))


def test_what_is_not_renewed_is_freed_only_while_a_server_looks(folder, store):
    store.create_partition(_ask())
    late = store.attach_renewed("p", 2, holder(), seconds=-1.0)
    kept = store.attach_renewed("p", 2, holder(), seconds=-1.0)
    store.close()
    with closing(FolderStore(folder)) as bystander:
        assert len(bystander.attachments()) == 2
    with closing(FolderStore(folder)) as server:
        server.renew_all(600)
        assert len(server.attachments()) == 2
        server.renew(kept.id, 600)
        server.renew(late.id, -1.0)
        server.note_run(time.monotonic() - 100)  # it was stopped since then
        assert len(server.attachments()) == 2
        server.note_run(time.monotonic())
        assert [each.ipus for each in server.attachments()] == [kept.ipus]
        with pytest.raises(UnknownNameError, match="attach the IPUs again"):
            server.renew(late.id, 600)
        server.detach(kept)
        assert server.attachments() == ()


def test_a_lock_is_not_renewed(store):
    store.create_partition(_ask())
    held = store.attach("p", 4, holder())
    with pytest.raises(UnknownNameError):
        store.renew(held.id, 1)


def test_a_slow_partition_becomes_active(tmp_path):
    folder = make_pod(tmp_path, replace(POD16, create_seconds=0.05, reset_seconds=0.05))
    with closing(FolderStore(folder)) as store:
        assert store.create_partition(_ask()).state is PartitionState.PENDING
        wait_until(lambda: store.partition("p").state is PartitionState.ACTIVE)
        assert store.reset_partition("p").state is PartitionState.PENDING
        wait_until(lambda: store.partition("p").state is PartitionState.ACTIVE)


def test_only_the_user_reads_and_writes(folder, store):
    store.create_partition(_ask())
    store.attach("p", 4, holder())
    modes = {
        path.relative_to(folder.parent): stat.S_IMODE(path.stat().st_mode)
        for path in [folder, *folder.rglob("*")]
    }
    assert set(modes.values()) == {0o600, 0o700}, modes
    for path, mode in modes.items():
        assert mode == (0o700 if (folder.parent / path).is_dir() else 0o600)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720])
def test_a_folder_that_others_may_change_is_refused(folder, mode):
    folder.chmod(mode)
    with pytest.raises(PodError, match="chmod go-w"):
        FolderStore(folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"no database at all" * 400),
        lambda file: file.write_bytes(file.read_bytes()[:5000]),
        lambda file: file.write_bytes(file.read_bytes()[:4096] + b"\xff" * 20000),
    ],
)
def test_a_damaged_database_is_said_and_left(folder, damage):
    file = folder / "pod.sqlite"
    damage(file)
    before = file.read_bytes()
    with pytest.raises(DamagedError, match=r"move pod\.sqlite and pod\.sqlite-wal to") as caught:
        FolderStore(folder)
    assert "\n" not in str(caught.value)
    assert file.read_bytes() == before


def test_the_whole_database_is_read_only_if_it_may_be_damaged(folder, monkeypatch):
    asked = []
    connect = sqlite3.connect

    def listening(*words, **values):
        connection = connect(*words, **values)
        connection.set_trace_callback(asked.append)
        return connection

    monkeypatch.setattr(pod_database.sqlite3, "connect", listening)
    with closing(FolderStore(folder)) as store:
        store.create_partition(_ask())
        assert not [each for each in asked if "check" in each]
    file = folder / "pod.sqlite"
    with file.open("ab") as stream:
        stream.write(b"\0" * 4096)
    with suppress(PodError):
        FolderStore(folder).close()
    assert [each for each in asked if "integrity_check" in each]


@pytest.mark.parametrize("every", [997, pytest.param(61, marks=pytest.mark.sweep)])
def test_a_database_that_is_damaged_anywhere_answers_or_is_said(folder, every):
    with closing(FolderStore(folder)) as store:
        store.create_partition(_ask())
    file = folder / "pod.sqlite"
    for _, data in damaged(file.read_bytes(), every=every):
        for path in folder.glob("pod.sqlite-*"):
            path.unlink()
        file.write_bytes(data)
        with suppress(PodError), closing(FolderStore(folder)) as store:
            store.pod()
            store.attachments()
            [store.partition(each.name) for each in store.partitions()]


def test_a_database_that_is_damaged_in_use_is_said(folder, store):
    store.create_partition(_ask())
    (folder / "pod.sqlite").write_bytes(b"\xff" * 8192)
    for call in (store.partitions, store.pod, lambda: store.create_partition(_ask("q"))):
        with pytest.raises(DamagedError):
            call()


def test_a_database_of_a_newer_version_is_left(folder):
    with closing(sqlite3.connect(folder / "pod.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(PodError, match="newer version"):
        FolderStore(folder)


@pytest.mark.parametrize(
    ("version", "error", "words"),
    [(2, PodError, "newer version"), (0, DamagedError, "not the database of a pod")],
)
def test_a_database_that_is_another_one_by_now_is_left(folder, store, version, error, words):
    with closing(sqlite3.connect(folder / "pod.sqlite")) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(error, match=words):
        store.create_partition(_ask())


def test_the_log_of_a_database_that_is_gone_is_not_taken_for_a_new_one(folder):
    killed = subprocess.run(
        [
            sys.executable, "-c",
            "import os, pathlib, sys\n"
            "from popdist_py.pods.folder.pod_database import transaction\n"
            "with transaction(pathlib.Path(sys.argv[1]), 5) as connection:\n"
            "    connection.execute('UPDATE layout SET id = 1')\n"
            "    connection.execute('COMMIT')\n"
            "    os.kill(os.getpid(), 9)\n",
            str(folder),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert killed.returncode == -9
    assert (folder / "pod.sqlite-wal").stat().st_size
    (folder / "pod.sqlite").rename(folder / "aside")
    with pytest.raises(DamagedError, match=r"pod\.sqlite is missing, but pod\.sqlite-wal.* move"):
        FolderStore(folder)
    assert not (folder / "pod.sqlite").exists()
    (folder / "pod.sqlite-wal").rename(folder / "aside-wal")
    with closing(FolderStore(folder)) as store:
        assert store.partitions() == ()


def test_a_folder_that_goes_away_is_said_and_not_made_anew(folder, store):
    store.create_partition(_ask())
    folder.rename(folder.with_name("moved"))
    with pytest.raises(PodError, match="does not exist, because the pod was removed"):
        store.partitions()
    assert not folder.exists()


def test_others_that_write_are_waited_for_only_so_long(folder):
    with closing(FolderStore(folder, busy_timeout=0.05)) as store:
        with closing(sqlite3.connect(folder / "pod.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(PodError, match="other processes were writing"):
                store.partitions()
        assert store.partitions() == ()


def test_a_full_disk_loses_nothing(folder, store):
    store.create_partition(_ask("before"))
    # What a disk without room does to writes, a limit of the kernel does to one process.
    code = (
        "import resource, signal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))\n"
        "from popdist_py.pods.model.pod_errors import PodError\n"
        "try:\n"
        "    for i in range(12):\n"
        "        store.create_partition(PartitionRequest(name=f'p{i}', size=1))\n"
        "        store.fail_partition(f'p{i}', 'x' * 30000)\n"
        "except PodError as error: print(error)\n"
    )
    with _program(code, folder) as process:
        said, wrong = process.communicate()
    assert "free space on the disk" in said, wrong
    assert said.count("\n") == 1
    assert store.partition("before").size == 4
    with closing(FolderStore(folder)) as again:
        assert "before" in {each.name for each in again.partitions()}


def _refusal_of_nobody(folder):
    """Return what a user without rights is told who opens a folder."""
    code = (
        "import os, pathlib, sys, tomllib\n"
        "from popdist_py.pods.model.pod_errors import PodError\n"
        "from popdist_py.pods.folder.folder_store import FolderStore\n"
        "os.seteuid(65534)\n"
        "try: FolderStore(pathlib.Path(sys.argv[1]))\n"
        "except PodError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.stdout


@pytest.fixture
def reachable():
    """Make a pod in a folder that other users can reach; nobody else's permissions are changed."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield make_pod(Path(place), POD16)


def test_another_users_folder_is_refused(reachable):
    reachable.chmod(0o755)
    assert "belongs to another user (user id 0): use your own pod" in _refusal_of_nobody(reachable)


def test_a_folder_that_may_not_be_written_is_said(reachable):
    for path in [reachable, *reachable.rglob("*")]:
        os.chown(path, 65534, 65534)
        path.chmod(0o500 if path.is_dir() else 0o400)
    assert "make the folder of this file writable" in _refusal_of_nobody(reachable)


def test_a_changed_file_counts_when_there_are_no_partitions(folder, store):
    store.create_partition(_ask())
    fewer = replace(
        POD16,
        agents=tuple(replace(agent, host="h9") for agent in POD16.agents),
        create_seconds=600.0,
    )
    (folder / POD_FILE).write_text(format_pod(fewer))
    with closing(FolderStore(folder)) as second:
        assert second.pod() == replace(POD16, create_seconds=600.0)
        assert second.partition("p").hosts == ("h1",)
        second.remove_partition("p", force=True)
    with closing(FolderStore(folder)) as third:
        assert third.pod() == fewer


def test_a_file_alone_gets_its_database(tmp_path):
    (tmp_path / POD_FILE).write_text(format_pod(POD16))
    tmp_path.chmod(0o700)
    with closing(FolderStore(tmp_path)) as store:
        assert store.pod() == POD16
        assert not list(tmp_path.glob(".pod.sqlite*"))


def test_processes_that_open_a_file_alone_share_one_database(tmp_path):
    (tmp_path / POD_FILE).write_text(format_pod(POD16))
    tmp_path.chmod(0o700)
    code = "print(store.create_partition(PartitionRequest(name=f'p{os.getpid()}', size=4)).size)"
    started = [_program(code, tmp_path) for _ in range(4)]
    for process in started:
        said, wrong = process.communicate()
        assert said == "4\n", wrong
    with closing(FolderStore(tmp_path)) as store:
        assert {each.name for each in store.partitions()} == {f"p{each.pid}" for each in started}


def test_a_store_that_nobody_keeps_holds_until_its_process_ends(folder, store):
    store.create_partition(_ask())
    code = (
        "import gc\n"
        "store.attach('p', 4, me)\n"
        "del store\n"
        "gc.collect()\n"
        "if os.fork() == 0: time.sleep(60)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    with _program(code, folder, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == "held\n", process.stderr.read()
            assert len(store.attachments()) == 1
            process.kill()
            process.wait()
            wait_until(lambda: store.attachments() == ())
        finally:
            os.killpg(process.pid, 9)


def test_importing_the_library_does_not_pay_for_it():
    code = (
        "import sys, popdist_py, popdist_py.pods.find_pod as f\n"
        "assert f.find_pod(None, {'POPRUN_PODS': '/nowhere'}) is None\n"
        "print(*sorted({'sqlite3', 'tomllib', 'urllib3'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "\n"
