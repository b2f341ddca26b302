"""Files that are unpickled: this user's own, and nobody else's to change."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from popdist_py.own_files import owner
from popdist_py.own_files.owner import NotOwnFileError, check_own_folder, open_own


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "folder" / "file"
    path.parent.mkdir(mode=0o700)
    path.touch(0o600)
    return path


def refusal(path):
    with pytest.raises(NotOwnFileError) as refused:
        open_own(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def is_opened(path):
    os.close(open_own(path))
    return True


@pytest.fixture
def stranger(monkeypatch):
    """Let files of this user be another one's."""
    monkeypatch.setattr(owner, "_ROOT", -1)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o400, 0o755])
def test_a_file_of_this_user_that_nobody_else_can_change_is_opened(file, mode):
    file.chmod(mode)
    assert is_opened(file)


@pytest.mark.parametrize("mode", [0o602, 0o666])
def test_a_file_that_others_can_change_is_refused(file, mode):
    file.chmod(mode)
    said = refusal(file)
    assert f"{file}: other users can write to the file (mode {mode:04o})" in said
    assert said.endswith(f"chmod go-w {file}")


def test_the_group_counts_unless_it_is_the_users_own(file, monkeypatch):
    """Where every user has a group, the umask lets it write."""
    file.chmod(0o660)
    for is_own in (True, False):
        monkeypatch.setattr(owner, "_is_private_group", lambda _, is_own=is_own: is_own)
        if is_own:
            assert is_opened(file)
        else:
            assert "mode 0660" in refusal(file)


class TestGroups:
    @pytest.fixture
    def is_private(self, monkeypatch, file):
        def ask(name, group_id, members):
            user = type("User", (), {"pw_name": "ada", "pw_gid": 7})
            group = type("Group", (), {"gr_name": name, "gr_gid": group_id, "gr_mem": members})
            monkeypatch.setattr(owner.pwd, "getpwuid", lambda _: user)
            monkeypatch.setattr(owner.grp, "getgrgid", lambda _: group)
            return owner._is_private_group(file.stat())

        return ask

    def test_a_group_of_the_users_name_with_nobody_else_is_private(self, is_private):
        assert is_private("ada", 7, [])
        assert is_private("ada", 7, ["ada"])

    def test_any_other_group_is_not(self, is_private):
        assert not is_private("staff", 7, [])
        assert not is_private("ada", 7, ["ada", "bob"])
        assert not is_private("ada", 8, [])

    def test_nobody_knows_an_unknown_group(self, file, monkeypatch):
        def unknown(_):
            raise KeyError

        monkeypatch.setattr(owner.grp, "getgrgid", unknown)
        assert not owner._is_private_group(file.stat())


def test_another_users_file_is_refused(file, stranger):
    with (
        file.open() as opened,
        pytest.raises(NotOwnFileError, match=f"^{file}: the file belongs to user"),
    ):
        owner.check_own(opened.fileno(), file)
    assert f"the file's folder {file.parent} belongs to user" in refusal(file)


@pytest.mark.parametrize("mode", [0o702, 0o777])
def test_a_folder_in_which_others_can_replace_the_file_is_refused(file, mode):
    file.parent.chmod(mode)
    said = refusal(file)
    assert (
        f"other users can replace files in the file's folder {file.parent} (mode {mode:04o})"
        in said
    )
    assert said.endswith(f"chmod go-w {file.parent}")
    with pytest.raises(
        NotOwnFileError, match=f"^{file.parent}: other users can replace files in the folder"
    ):
        check_own_folder(file.parent)


def test_a_sticky_folder_is_as_good_as_an_own_one(file):
    file.parent.chmod(0o1777)
    assert is_opened(file)
    check_own_folder(file.parent)


def test_links_are_followed_and_what_they_lead_to_counts(file, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(file)
    assert is_opened(link)
    file.parent.chmod(0o777)
    assert str(file.parent) in refusal(link)


def test_a_path_that_changes_after_the_question_gives_nothing(file, tmp_path, monkeypatch):
    """The folder that was looked at is the one that is read from, and a link in it is refused."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("another's")
    file.write_text("own")
    check = owner._check_folder

    def moved(descriptor, folder, path):
        check(descriptor, folder, path)
        folder.rename(tmp_path / "away")
        other.rename(folder)

    monkeypatch.setattr(owner, "_check_folder", moved)
    with os.fdopen(open_own(file)) as opened:
        assert opened.read() == "own"

    def linked(descriptor, folder, path):
        check(descriptor, folder, path)
        file.unlink()
        file.symlink_to(tmp_path / "away" / "file")

    monkeypatch.setattr(owner, "_check_folder", linked)
    with pytest.raises(OSError, match="symbolic links"):
        open_own(file)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path(os.devnull)):
        with pytest.raises(OSError, match="not a regular file"):
            open_own(path)
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path / "circle", tmp_path / "nothing"):
        with pytest.raises(OSError):
            open_own(path)


def test_no_descriptor_is_left(file, tmp_path):
    def descriptors():
        return sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208

    before = descriptors()
    is_opened(file)
    for mode in (0o666, stat.S_IRUSR):
        file.chmod(mode)
        with suppress(NotOwnFileError):
            os.close(open_own(file))
    file.parent.chmod(0o777)
    refusal(file)
    assert descriptors() == before
