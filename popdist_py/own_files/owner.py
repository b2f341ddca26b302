"""Whose a file is: loading a pickle runs code, so nobody else may have written it.

All is asked of opened descriptors: what a path names can change between the question and the
reading. Nothing here reads a file.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["NotOwnFileError", "check_own", "check_own_folder", "open_own"]

_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_ROOT = 0


class NotOwnFileError(Exception):
    """Somebody else may have written the file; the message says who, and what to do."""


def open_own(path: Path) -> int:
    """Open a file that only this user or root can have written, and return its descriptor.

    Links are followed; what counts is the file that they lead to, and the folder that it lies in.

    Raises:
        NotOwnFileError: the file or its folder is another user's, or others can write to it.
        OSError: it cannot be opened, or is no regular file.
    """
    path = Path(os.path.realpath(path))  # Path.resolve() has other errors for circles of links
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
    """Refuse an opened file that somebody else than this user or root can have written.

    Args:
        descriptor: of the file.
        path: how messages name it.

    Raises:
        NotOwnFileError: it is another user's, or others can write to it.
        OSError: it is no regular file.
    """
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    if _is_strangers(found):
        raise _refusal(path, f"it belongs to {_user(found)}", "copy it, if you trust them: cp")
    if _others_write(found):
        raise _refusal(path, f"others can write to it ({_mode(found)})", f"chmod go-w {path}")


def check_own_folder(path: Path) -> None:
    """Refuse a folder in which others can put files in the place of this user's.

    A sticky folder, such as /tmp, lets nobody replace another one's.

    Raises:
        NotOwnFileError: it is another user's, or others can write to it.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, _READ | os.O_DIRECTORY)
    try:
        _check_folder(descriptor, path, path)
    finally:
        os.close(descriptor)


def _check_folder(descriptor: int, folder: Path, path: Path) -> None:
    found = os.fstat(descriptor)
    name = "it" if folder == path else f"its folder {folder}"
    if _is_strangers(found):
        raise _refusal(path, f"{name} belongs to {_user(found)}", "take a folder of your own")
    if _others_write(found) and not found.st_mode & stat.S_ISVTX:
        raise _refusal(
            path, f"others can replace files in {name} ({_mode(found)})", f"chmod go-w {folder}"
        )


def _refusal(path: Path, problem: str, advice: str) -> NotOwnFileError:
    return NotOwnFileError(
        f"{path}: {problem}, and loading runs code that it names: expected what this user or root "
        f"has written, and nobody else can change; {advice}"
    )


def _is_strangers(found: os.stat_result) -> bool:
    return found.st_uid not in (os.geteuid(), _ROOT)


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found)


def _is_private_group(found: os.stat_result) -> bool:
    """Tell whether a group has nobody but the owner in it: many systems give each user one."""
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
