"""Copies a folder to the same path on other hosts with rsync: only what changed, nothing outside.

Nothing is deleted there. No symbolic link is followed. A link that leads out of the folder is
copied only with a Python environment, whose Python is such a link.
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
from poprun_py.machines.remote_shell import Shell, explain, read_back, scratch_file

_LEFT_OUT = (".git", "__pycache__")
_AT_ONCE = 16
# Limits a stalled connection. The whole copy has no limit.
_STALL_SECONDS = 15


def folder_to_sync(path: str, option: str = "--sync") -> Path:
    """Return the folder that an option names, in full, as programs are named by the same path.

    Raises:
        UsageError: it is no folder, or one that belongs to the host and not to a program.
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
    """Return the rsync command that brings ``folder`` to ``host``, its links out of it or not."""
    remote = shlex.join(shell.words) if shell.words else "ssh"
    address = f"[{host}]" if ":" in host else host
    return (
        "rsync", "--archive", "--mkpath", f"--timeout={_STALL_SECONDS}",
        *(() if links_out else ("--safe-links",)),
        *(f"--exclude={name}" for name in _LEFT_OUT), "--rsh", remote,
        "--", f"{folder}/", f"{address}:{folder}/",
    )  # fmt: skip


def sync_folder(
    folder: Path, hosts: Sequence[Host], shell: Shell, *, links_out: bool = False
) -> None:
    """Bring ``folder`` to every host but this one, several at a time.

    Raises:
        StartError: rsync is missing here, or a host did not take the folder.
    """
    others = [host.name for host in hosts if not host.is_local]
    commands = [(name, sync_command(folder, name, shell, links_out=links_out)) for name in others]
    for start in range(0, len(commands), _AT_ONCE):
        _sync_batch(folder, commands[start : start + _AT_ONCE])


def _sync_batch(folder: Path, commands: Sequence[tuple[str, tuple[str, ...]]]) -> None:
    running: list[tuple[str, subprocess.Popen[bytes], IO[bytes]]] = []
    with contextlib.ExitStack() as stack:
        for host, command in commands:
            said = stack.enter_context(scratch_file())
            running.append((host, _start(command, said), said))
            stack.callback(_end, running[-1][1])
        for host, process, said in running:
            if process.wait():
                raise StartError(_failure(host, folder, read_back(said).decode(errors="replace")))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _start(command: tuple[str, ...], said: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
        )
    except OSError as error:
        raise StartError(f"cannot run rsync: {error.strerror}; install it on every host") from None


def _failure(host: str, folder: Path, said: str) -> str:
    if "rsync: command not found" in said or "rsync: not found" in said:
        return f"host {host}: rsync is missing there; install it on every host"
    own = [line for line in said.splitlines() if not line.startswith("rsync error: unexplained")]
    return f"host {host}: {explain(host, chr(10).join(own), f'copying {folder}')}"


def environment_folder(option: str = "--synchronise-python-venv yes") -> Path:
    """Return the folder of the Python environment that runs now; messages name ``option``.

    Raises:
        UsageError: this Python is no virtual environment.
    """
    if sys.prefix == sys.base_prefix:
        raise UsageError(
            f"{option}: this Python runs in no virtual environment; install the same Python and "
            "packages on every host"
        )
    return folder_to_sync(sys.prefix, option)
