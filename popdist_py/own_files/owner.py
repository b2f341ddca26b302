"""Checks that only this user or root can have written a file.

Loading a pickle runs code, so only this user or root may have written the pickle. The checks use
open file descriptors, because a path may name another file after the check.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_ROOT = 0


class NotOwnFileError(Exception):
    """Raised if another user may have written a file. The message names the reason and a remedy."""


def open_own(path: Path) -> int:
    """Open a file that only this user or root can have written, and return its descriptor.

    Symbolic links are followed. The target file and its folder are checked.

    Raises:
        NotOwnFileError: The file or its folder belongs to another user, or other users can write to
            it.
        OSError: The file cannot be opened, or is not a regular file.
    """
    # For a loop of symbolic links, Path.resolve() may raise RuntimeError instead of OSError.
    path = Path(os.path.realpath(path))
    folder = os.open(path.parent, _READ | os.O_DIRECTORY)
    try:
        _check_folder(folder, path.parent, path)
        descriptor = os.open(path.name, _READ | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        check_own(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_own(descriptor: int, path: Path) -> None:
    """Check that only this user or root can have written an open file.

    Args:
        descriptor: The descriptor of the file.
        path: The path of the file, for error messages only.

    Raises:
        NotOwnFileError: The file belongs to another user, or other users can write to it.
        OSError: The file is not a regular file.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "the path is not a regular file", str(path))
    if _has_other_owner(found):
        raise _refusal(
            path,
            f"the file belongs to {_user(found)}",
            "if you trust this user, load a copy that you make with cp",
        )
    if _others_write(found):
        raise _refusal(
            path, f"other users can write to the file ({_mode(found)})", f"run chmod go-w {path}"
        )


def check_own_folder(path: Path) -> None:
    """Check that other users cannot replace the files of this user in a folder.

    In a sticky folder, such as /tmp, users can replace only their own files.

    Raises:
        NotOwnFileError: The folder belongs to another user, or other users can replace files in it.
        OSError: The folder cannot be opened.
    """
    descriptor = os.open(path, _READ | os.O_DIRECTORY)
    try:
        _check_folder(descriptor, path, path)
    finally:
        os.close(descriptor)


def _check_folder(descriptor: int, folder: Path, path: Path) -> None:
    found = os.fstat(descriptor)
    name = "the folder" if folder == path else f"the file's folder {folder}"
    if _has_other_owner(found):
        raise _refusal(path, f"{name} belongs to {_user(found)}", "use a folder of your own")
    if _others_write(found) and not found.st_mode & stat.S_ISVTX:
        raise _refusal(
            path,
            f"other users can replace files in {name} ({_mode(found)})",
            f"run chmod go-w {folder}",
        )


def _refusal(path: Path, problem: str, advice: str) -> NotOwnFileError:
    return NotOwnFileError(
        f"{path}: {problem}, but loading a file can run code that the file names: expected a file "
        f"that only this user or root can have written; {advice}"
    )


def _has_other_owner(found: os.stat_result) -> bool:
    return found.st_uid not in (os.geteuid(), _ROOT)


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found)


def _is_private_group(found: os.stat_result) -> bool:
    """Return whether the file's owner is the only member of the file's group.

    Many systems create a private group, with one member, for each user.
    """
    with suppress(KeyError):
        owner, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
        is_owners = group.gr_name == owner.pw_name and group.gr_gid == owner.pw_gid
        return is_owners and not {*group.gr_mem} - {owner.pw_name}
    return False


def _user(found: os.stat_result) -> str:
    with suppress(KeyError):
        return f"user {pwd.getpwuid(found.st_uid).pw_name}"
    return f"user {found.st_uid}"


def _mode(found: os.stat_result) -> str:
    return f"mode {stat.S_IMODE(found.st_mode):04o}"
