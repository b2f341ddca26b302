"""The folder of leases ignores files of dead processes and other files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import sys

import pytest

from poprun_py.machines import lease_files
from poprun_py.machines.lease_files import JobProcess, LeaseFolder, LeaseRecord

JOB = JobProcess(pid=7, process_start=3, program="train.py")
RECORD = LeaseRecord("lease-a", str(os.geteuid()), JOB, cpus=(0, 1), numa_nodes=(0,), since=1.0)


@pytest.fixture
def folder(place):
    with contextlib.closing(LeaseFolder(place)) as made:
        yield made


def test_all_users_can_write_to_a_new_folder_whatever_the_umask(tmp_path):
    before = os.umask(0o077)
    try:
        LeaseFolder(tmp_path / "new" / "leases").close()
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "leases").stat().st_mode) == 0o1777
    assert not (tmp_path / "new").stat().st_mode & 0o002


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_folder_where_others_could_replace_files_is_refused(place, mode):
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(PermissionError, match=f"chmod 1777 {place}"):
        LeaseFolder(place)
    place.chmod(0o700)
    LeaseFolder(place).close()


def test_a_link_or_a_file_instead_of_the_folder_is_refused(tmp_path, place):
    place.symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        LeaseFolder(place)
    place.unlink()
    place.touch()
    with pytest.raises(OSError, match="Not a directory"):
        LeaseFolder(place)


def test_a_record_is_readable_by_all_users_until_it_is_removed(folder, place):
    before = os.umask(0o077)
    try:
        with folder.mutex():
            file = folder.create(RECORD)
            assert folder.live_records() == [RECORD]
            for run_id in ("a-long-name", "short"):
                changed = RECORD._replace(job=JOB._replace(run_id=run_id))
                file.write(changed)
                assert folder.live_records() == [changed]
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in place.iterdir()} == {0o644}
    file.close()
    assert [each.name for each in place.iterdir()] == []


def test_other_files_in_the_folder_are_ignored(folder, place):
    with folder.mutex():
        file = folder.create(RECORD)
    os.mkfifo(place / "lease-fifo")
    (place / "lease-link").symlink_to(place / "lease-a")
    (place / "lease-nowhere").symlink_to(place / "nowhere")
    (place / "lease-folder").mkdir()
    (place / "notes").write_text("mine")
    huge = os.open(place / "lease-huge", os.O_CREAT | os.O_RDWR)
    os.truncate(huge, 1 << 40)
    fcntl.flock(huge, fcntl.LOCK_EX)
    # Reading the pipe or the huge file would never end.
    with folder.mutex():
        assert folder.live_records() == [RECORD]
    assert (place / "notes").read_text() == "mine"
    os.close(huge)
    file.close()


def test_leases_are_not_overlooked_if_this_process_has_too_many_open_files(folder, monkeypatch):
    with folder.mutex():
        file = folder.create(RECORD)
        real = os.open

        def no_more(path, *words, **settings):
            if path == "lease-a":
                raise OSError(errno.EMFILE, "Too many open files")
            return real(path, *words, **settings)

        monkeypatch.setattr(os, "open", no_more)
        with pytest.raises(OSError, match="Too many open files"):
            folder.live_records()
    file.close()


def test_files_of_dead_processes_are_removed_at_once(folder, holder, place):
    process = holder().process
    with folder.mutex():
        assert len(folder.live_records()) == 1
    process.kill()
    process.wait()
    (place / ".new-1-00").write_text("its process was killed early")
    with folder.mutex():
        assert folder.live_records() == []
    assert [each.name for each in place.iterdir()] == []


def test_an_error_says_that_the_folder_was_removed(folder, place):
    place.rmdir()
    with (
        folder.mutex(),
        pytest.raises(
            OSError, match="the folder was removed, or other processes remove new files from it"
        ),
    ):
        folder.create(RECORD)


def test_child_processes_do_not_inherit_the_lock(folder):
    with folder.mutex():
        file = folder.create(RECORD)
        child = subprocess.Popen(
            [sys.executable, "-c", "print(1, flush=True); input()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False,
        )  # fmt: skip
        child.stdout.readline()
    os.close(file.descriptor)  # without removing the file, as a kill would
    with folder.mutex():
        assert folder.live_records() == []
    child.communicate(b"\n")


def test_waiting_for_the_mutex_has_a_time_out(folder, place, monkeypatch):
    monkeypatch.setattr(lease_files, "_MUTEX_SECONDS", 0.05)
    with (
        folder.mutex(),
        contextlib.closing(LeaseFolder(place)) as other,
        pytest.raises(TimeoutError) as caught,
        other.mutex(),
    ):
        pass
    assert caught.value.filename == str(place)
    with folder.mutex():
        pass


def test_a_full_file_system_leaves_no_file_behind(folder, place, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with folder.mutex(), pytest.raises(OSError, match="No space"):
        folder.create(RECORD)
    assert [each.name for each in place.iterdir()] == []
