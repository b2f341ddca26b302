"""Copying of folders to the same path on other hosts, with rsync, which sends only changed files.

Files on the other hosts are never deleted, and symbolic links are not followed. Symbolic links to
places outside the folder are copied only if the folder is a Python environment, because
``bin/python`` of an environment may be a link to another Python.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from poprun_py.errors import StartError, UsageError
from poprun_py.machines.host_list import Host
from poprun_py.machines.remote_shell import (
    Shell,
    end_process,
    explain_ssh_error,
    read_back,
    scratch_file,
)

_EXCLUDED = (".git", "__pycache__")
_MAX_AT_ONCE = 16
# rsync's time-out for a connection without traffic, in seconds. The duration of a whole copy is not
# limited.
_STALL_SECONDS = 15


def folder_to_sync(path: str, option: str = "--sync") -> Path:
    """Return the absolute path of the folder that an option names.

    Symbolic links in the path are kept, because the paths of programs may contain them.

    Raises:
        UsageError: The folder is missing, or it is a system or home folder such as ``/usr``.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: no such folder")
    resolved = folder.resolve()
    if len(resolved.parts) < 3 or resolved == Path.home().resolve():
        raise UsageError(
            f"{option} {path}: {resolved} belongs to the host itself; expected the folder of a "
            "program"
        )
    return resolved if ".." in folder.parts else folder


def sync_command(
    folder: Path, host: str, shell: Shell, *, links_out: bool = False
) -> tuple[str, ...]:
    """Return the rsync command that copies ``folder`` to ``host``.

    ``links_out`` tells whether rsync copies symbolic links to places outside the folder.
    """
    remote = shlex.join(shell.words) if shell.words else "ssh"
    address = f"[{host}]" if ":" in host else host
    return (
        "rsync", "--archive", "--mkpath", f"--timeout={_STALL_SECONDS}",
        *(() if links_out else ("--safe-links",)),
        *(f"--exclude={name}" for name in _EXCLUDED), "--rsh", remote,
        "--", f"{folder}/", f"{address}:{folder}/",
    )  # fmt: skip


def sync_folder(
    folder: Path, hosts: Sequence[Host], shell: Shell, *, links_out: bool = False
) -> None:
    """Copy ``folder`` to all hosts except this machine; ``links_out`` is as in ``sync_command``.

    Raises:
        StartError: The command rsync is missing on this machine, or a copy failed.
    """
    others = [host.name for host in hosts if not host.is_local]
    commands = [(name, sync_command(folder, name, shell, links_out=links_out)) for name in others]
    for start in range(0, len(commands), _MAX_AT_ONCE):
        _sync_batch(folder, commands[start : start + _MAX_AT_ONCE])


def _sync_batch(folder: Path, commands: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    running: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []
    with contextlib.ExitStack() as stack:
        for host, command in commands:
            err = stack.enter_context(scratch_file())
            running.append((host, _start(command, err), err))
            stack.callback(end_process, running[-1][1])
        for host, process, err in running:
            if process.wait():
                raise StartError(_failure(host, folder, read_back(err).decode(errors="replace")))


def _start(command: tuple[str, ...], err: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err
        )
    except OSError as error:
        raise StartError(f"cannot run rsync: {error.strerror}; install it on every host") from None


def _failure(host: str, folder: Path, stderr: str) -> str:
    if "rsync: command not found" in stderr or "rsync: not found" in stderr:
        return f"host {host}: rsync is missing there; install it on every host"
    own = [line for line in stderr.splitlines() if not line.startswith("rsync error: unexplained")]
    return f"host {host}: {explain_ssh_error(host, chr(10).join(own), f'copying {folder}')}"


def environment_folder(option: str = "--synchronise-python-venv yes") -> Path:
    """Return the folder of the current virtual environment; error messages name ``option``.

    Raises:
        UsageError: This Python does not run in a virtual environment.
    """
    if sys.prefix == sys.base_prefix:
        raise UsageError(
            f"{option}: this Python does not run in a virtual environment; install the same Python "
            "and packages on every host"
        )
    return folder_to_sync(sys.prefix, option)
