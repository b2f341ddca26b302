"""A job's folders are removed by the last process that uses them, or by a later job."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.repository import ROOT

from poprun_py.instance import job_folders
from poprun_py.instance.job_folders import (
    CheckpointMemory,
    JobFolder,
    folder_name,
    remove_abandoned,
)
from poprun_py.process_info import start_ticks

SECRET = bytes(6)


@pytest.fixture
def dead():
    """The id of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


@pytest.mark.parametrize("kind", ["12", "files-12", "host", "job", "states"])
def test_names_of_job_folders_are_recognised(kind):
    assert job_folders.is_job_folder(f"/any/{folder_name(kind)}")
    assert folder_name(kind, SECRET) == f"poprun-{kind}-000000000000"


def test_leaving_waits_for_a_killed_process_that_still_uses_the_folder(tmp_path):
    mine, others = (JobFolder.make(str(tmp_path), folder_name("12", SECRET)) for _ in range(2))
    ends = threading.Timer(0.05, others.close)
    ends.start()
    mine.leave(wait_seconds=30)
    ends.join()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "", "tmp", "poprun", "poprun-py-leases", "poprun-000000000000", "poprun-12-00000000000",
        "poprun-12-00000000000g", "poprun-x-000000000000", "poprun-12-12-000000000000",
        "poprun-12-000000000000-kept", "poprun-files-000000000000", "my-12-000000000000",
    ],
)  # fmt: skip
def test_folders_with_other_names_are_left_alone(name, tmp_path):
    assert not job_folders.is_job_folder(f"/any/{name}")
    if name:
        (tmp_path / name).mkdir()
        remove_abandoned([str(tmp_path)])
        assert (tmp_path / name).is_dir()
        assert JobFolder.join(str(tmp_path / name)) is None


def test_the_last_process_that_uses_a_folder_removes_it(tmp_path):
    first = JobFolder.make(str(tmp_path), folder_name("host", SECRET))
    second = JobFolder.make(str(tmp_path), folder_name("host", SECRET))
    third = JobFolder.join(first.path)
    assert first.path == second.path == third.path
    Path(first.path, "within").mkdir()
    Path(first.path, "within", "file").touch()
    Path(first.path, "outside").symlink_to(tmp_path)
    for folder in (first, third):
        folder.leave()
        assert Path(folder.path).is_dir()
    second.leave()
    assert list(tmp_path.iterdir()) == []
    second.leave()  # has no effect
    second.remove()
    assert JobFolder.join(second.path) is None


def test_abandoned_folders_are_removed_and_used_ones_are_not(tmp_path, dead):
    held = JobFolder.make(str(tmp_path), folder_name(str(dead)))
    left = [tmp_path / folder_name(kind) for kind in (str(dead), f"files-{dead}", "host", "job")]
    # Launchers of earlier versions do not lock their folders.
    earlier = tmp_path / folder_name(str(os.getpid()))
    for folder in (*left, earlier):
        folder.mkdir(mode=0o700)
        (folder / "file").touch()
    link = tmp_path / folder_name("host")
    link.symlink_to(earlier)
    remove_abandoned([str(tmp_path), "/no/such/folder"])
    assert not any(folder.exists() for folder in left)
    assert (earlier / "file").exists()
    assert link.is_symlink()
    assert Path(held.path).exists()
    held.close()
    remove_abandoned([str(tmp_path)], dead=os.getpid())
    assert not earlier.exists()
    assert Path(held.path).exists()
    remove_abandoned([str(tmp_path)])
    assert sorted(tmp_path.iterdir()) == [link]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has folders of other users")
def test_a_folder_of_another_user_is_neither_removed_nor_used(tmp_path):
    folder = tmp_path / folder_name("host", SECRET)
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    remove_abandoned([str(tmp_path)])
    assert folder.is_dir()
    with pytest.raises(PermissionError, match="other users can enter"):
        JobFolder.make(str(tmp_path), folder.name)


def test_a_folder_that_others_may_enter_is_not_used(tmp_path):
    folder = tmp_path / folder_name("host", SECRET)
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(PermissionError):
        JobFolder.make(str(tmp_path), folder.name)
    assert JobFolder.join(str(folder)) is None


def test_a_file_system_without_locks_keeps_its_folders(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    held = JobFolder.make(str(tmp_path), folder_name("host"))
    left = tmp_path / folder_name("host")
    left.mkdir(mode=0o700)
    remove_abandoned([str(tmp_path)])
    held.leave()
    assert len(list(tmp_path.iterdir())) == 2
    held = JobFolder.join(held.path)
    held.remove()
    assert list(tmp_path.iterdir()) == [left]


@pytest.mark.parametrize(("module", "call"), [(os, "mkdir"), (fcntl, "flock")])
def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    tmp_path, monkeypatch, module, call
):
    """Another process may remove it before this one opens it, or before this one locks it."""
    path, removed = tmp_path / folder_name("host", SECRET), []
    real = getattr(module, call)

    def remove_around(*arguments):
        if removed:
            real(*arguments)
            return
        if module is os:
            real(*arguments)
        path.rmdir()
        removed.append(path)
        if module is not os:
            real(*arguments)

    monkeypatch.setattr(module, call, remove_around)
    held = JobFolder.make(str(tmp_path), path.name)
    assert removed
    assert JobFolder.join(held.path) is not None
    held.remove()


@pytest.fixture
def removed_slowly(tmp_path, monkeypatch):
    """Give a folder that another process has locked, and removes after 100 pauses."""
    path, pauses = tmp_path / folder_name("host", SECRET), []
    path.mkdir(mode=0o700)
    remover = JobFolder(str(path), os.open(path, os.O_RDONLY))
    assert job_folders._lock_alone(remover.descriptor)

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 100:
            remover.remove()

    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pause)
    monkeypatch.setattr(job_folders, "time", clock)
    yield path
    remover.close()


def test_making_a_folder_waits_until_another_process_has_removed_it(tmp_path, removed_slowly):
    held = JobFolder.make(str(tmp_path), removed_slowly.name)
    assert JobFolder.join(held.path) is not None
    held.remove()


def test_making_a_folder_fails_if_another_process_keeps_removing_it(
    tmp_path, removed_slowly, monkeypatch
):
    monkeypatch.setattr(job_folders, "_MAKE_SECONDS", 0.1)
    with pytest.raises(BlockingIOError, match="another process keeps removing"):
        JobFolder.make(str(tmp_path), removed_slowly.name)


def test_files_of_a_dead_daemon_are_removed_with_the_folder(tmp_path):
    program = "import sys; input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as daemon:
        files = tmp_path / f"prted.{daemon.pid}"
        others = tmp_path / "others"
        for folder in (files / "within", others):
            folder.mkdir(parents=True)
        for _ in range(2):  # every instance records it
            held = JobFolder.make(str(tmp_path), folder_name("host", SECRET))
            held.record_daemon(str(files), daemon.pid)
            held.record_daemon(str(others), daemon.pid)  # the name lacks the daemon's process id
            held.record_daemon(f"relative.{daemon.pid}", daemon.pid)
            assert len(list(Path(held.path).iterdir())) == 1
        remove_abandoned([str(tmp_path)])
        assert files.exists()
        left = JobFolder.make(str(tmp_path), folder_name("host"))
        left.record_daemon(str(files), daemon.pid)
        left.leave()  # a living daemon removes its own files
        assert files.exists()
        daemon.communicate(b"\n")
    assert start_ticks(daemon.pid) is None
    held.remove()
    assert sorted(tmp_path.iterdir()) == [others]


def test_folders_are_made_and_removed_with_few_modules(tmp_path):
    script = (
        f"import os, sys; sys.path.append({str(ROOT)!r})\n"
        "from poprun_py.instance import job_folders\n"
        "print(*sys.modules)\n"
        f"folder = job_folders.JobFolder.make({str(tmp_path)!r}, 'poprun-job-' + '0' * 12)\n"
        "folder.record_daemon(f'/x.{os.getppid()}', os.getppid())\n"
        "os.makedirs(f'{folder.path}/some/files')\n"
        "folder.leave()\n"
        "print(*sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True
    )
    at_start, at_end = (set(line.split()) for line in told.stdout.splitlines())
    assert not {"contextlib", "re", "shutil", "pathlib", "fcntl"} & at_start
    assert not {"contextlib", "re", "shutil", "pathlib"} & at_end
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_removed_with_all_that_is_in_it_and_nothing_else(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    held = JobFolder.make(str(tmp_path), folder_name("job"))
    deep = Path(held.path).joinpath(*["folder"] * 20)
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (deep / "empty").mkdir()
    (deep / "link to a folder").symlink_to(outside)
    (deep / "daemon-1-2").mkdir()
    Path(held.path, "daemon-3").touch()
    Path(held.path, "link").symlink_to(outside / "file")
    os.mkfifo(deep / "pipe")
    (Path(os.fsdecode(b"%b/\xff" % os.fsencode(held.path)))).touch()
    held.leave()
    assert [str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")] == [
        "outside",
        "outside/file",
    ]


def test_states_are_kept_for_a_restart_and_removed_by_the_last_process(tmp_path):
    path = tmp_path / folder_name("states")
    launcher, wrapper = (CheckpointMemory(str(path)) for _ in range(2))
    launcher.hold()  # no program has made the folder yet
    path.mkdir(mode=0o700)
    launcher.hold()
    wrapper.release(is_kept=True)
    assert path.is_dir()
    wrapper.release(is_kept=False)  # the launcher still uses the folder
    assert path.is_dir()
    launcher.release(is_kept=False)
    assert not path.exists()
    launcher.release(is_kept=False)


def test_states_without_a_lock_are_removed_later_than_a_restart_takes(tmp_path):
    path = tmp_path / folder_name("states")
    path.mkdir(mode=0o700)
    os.utime(path, (0, 0))
    memory = CheckpointMemory(str(path))
    memory.hold()
    remove_abandoned([str(tmp_path)])
    memory.release(is_kept=True)
    remove_abandoned([str(tmp_path)])
    assert path.is_dir()
    os.utime(path, (0, 0))
    remove_abandoned([str(tmp_path)])
    assert not path.exists()


def test_jobs_keep_their_states_in_different_folders_of_shared_memory():
    one, other = CheckpointMemory(), CheckpointMemory()
    assert one.path != other.path
    assert all(job_folders.is_job_folder(each.path) for each in (one, other))
