"""Files that are there while their maker lives, in a folder where anybody may put anything."""

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
from poprun_py.machines.lease_files import LeaseFolder


@pytest.fixture
def folder(place):
    with contextlib.closing(LeaseFolder(place)) as made:
        yield made


def test_the_folder_is_made_for_everybody_whatever_the_umask(tmp_path):
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


def test_a_link_or_a_file_is_no_folder(tmp_path, place):
    place.symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        LeaseFolder(place)
    place.unlink()
    place.touch()
    with pytest.raises(OSError, match="Not a directory"):
        LeaseFolder(place)


def test_a_file_is_readable_by_all_and_there_until_it_is_removed(folder, place):
    before = os.umask(0o077)
    try:
        with folder.mutex():
            descriptor = folder.create("lease-a", "text")
            assert folder.live_files() == [("lease-a", os.geteuid(), b"text")]
            folder.rewrite(descriptor, "longer text")
            assert folder.live_files()[0][2] == b"longer text"
            folder.rewrite(descriptor, "new")
            assert folder.live_files()[0][2] == b"new"
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in place.iterdir()} == {0o644}
    folder.remove("lease-a", descriptor)
    assert [each.name for each in place.iterdir()] == ["mutex"]


def test_what_others_put_there_is_passed_over(folder, place):
    with folder.mutex():
        descriptor = folder.create("lease-a", "text")
    os.mkfifo(place / "lease-fifo")
    (place / "lease-link").symlink_to(place / "lease-a")
    (place / "lease-nowhere").symlink_to(place / "nowhere")
    (place / "lease-folder").mkdir()
    (place / "notes").write_text("mine")
    huge = os.open(place / "lease-huge", os.O_CREAT | os.O_RDWR)
    os.truncate(huge, 1 << 40)
    fcntl.flock(huge, fcntl.LOCK_EX)
    # Reading the pipe or the whole huge file would never end.
    with folder.mutex():
        assert [name for name, *_ in folder.live_files()] == ["lease-a"]
    assert (place / "notes").read_text() == "mine"
    os.close(huge)
    folder.remove("lease-a", descriptor)


def test_without_a_descriptor_nobody_is_overlooked(folder, monkeypatch):
    with folder.mutex():
        descriptor = folder.create("lease-a", "text")
        real = os.open

        def no_more(path, *words, **settings):
            if path == "lease-a":
                raise OSError(errno.EMFILE, "Too many open files")
            return real(path, *words, **settings)

        monkeypatch.setattr(os, "open", no_more)
        with pytest.raises(OSError, match="Too many open files"):
            folder.live_files()
    folder.remove("lease-a", descriptor)


def test_files_of_the_dead_are_swept_at_once(folder, holder, place):
    process = holder().process
    with folder.mutex():
        assert len(folder.live_files()) == 1
    process.kill()
    process.wait()
    (place / ".new-1-00").write_text("killed before it was seen")
    with folder.mutex():
        assert folder.live_files() == []
    assert [each.name for each in place.iterdir()] == ["mutex"]


def test_a_program_that_is_started_inherits_no_lock(folder):
    with folder.mutex():
        descriptor = folder.create("lease-a", "text")
        child = subprocess.Popen(
            [sys.executable, "-c", "print(1, flush=True); input()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False,
        )  # fmt: skip
        child.stdout.readline()
    os.close(descriptor)  # without removing the file, as a kill would
    with folder.mutex():
        assert folder.live_files() == []
    child.communicate(b"\n")


def test_a_mutex_that_somebody_keeps_is_not_waited_for_without_end(folder, place, monkeypatch):
    monkeypatch.setattr(lease_files, "_MUTEX_SECONDS", 0.05)
    with (
        folder.mutex(),
        contextlib.closing(LeaseFolder(place)) as other,
        pytest.raises(TimeoutError) as caught,
        other.mutex(),
    ):
        pass
    assert caught.value.filename == str(place / "mutex")
    with folder.mutex():
        pass


def test_a_mutex_that_its_owner_removes_is_made_anew(folder, place, monkeypatch):
    first = LeaseFolder._is_mutex
    calls = []

    def removed_once(self, descriptor):
        if not calls:
            (place / "mutex").unlink()
        calls.append(descriptor)
        return first(self, descriptor)

    monkeypatch.setattr(LeaseFolder, "_is_mutex", removed_once)
    with folder.mutex():
        assert (place / "mutex").exists()
    assert len(calls) == 2


def test_a_pipe_in_place_of_the_mutex_is_refused(folder, place):
    os.mkfifo(place / "mutex")
    with pytest.raises(OSError, match="not a regular file"), folder.mutex():
        pass


def test_a_full_file_system_leaves_nothing(folder, place, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with folder.mutex(), pytest.raises(OSError, match="No space"):
        folder.create("lease-a", "text")
    assert [each.name for each in place.iterdir()] == ["mutex"]
