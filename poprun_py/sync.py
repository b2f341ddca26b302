"""Copies a folder to the same path on other hosts with rsync: only what changed, nothing outside.

Nothing is deleted there, and a symbolic link that leads out of the folder is not followed or
copied.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from poprun_py.errors import StartError, UsageError
from poprun_py.hosts import Host
from poprun_py.remote import Shell, explain

__all__ = ["folder_to_sync", "sync_command", "sync_folder"]

_LEFT_OUT = (".git", "__pycache__")
_AT_ONCE = 16
# Of a stalled connection, not of the whole copy, which takes as long as it takes.
_STALL_SECONDS = 15


def folder_to_sync(given: str, option: str = "--sync") -> Path:
    """Return the folder that an option names, in full.

    Raises:
        UsageError: it is no folder, or one that belongs to the host and not to a program.
    """
    folder = Path(given).absolute()
    if not folder.is_dir():
        raise UsageError(f"{option} {given}: no such folder")
    resolved = folder.resolve()
    if len(resolved.parts) < 3 or resolved == Path.home().resolve():
        raise UsageError(
            f"{option} {given}: {resolved} belongs to the host itself; expected the folder of a "
            "program"
        )
    return resolved


def sync_command(folder: Path, host: str, shell: Shell) -> tuple[str, ...]:
    """Return the rsync command that brings ``folder`` to ``host``."""
    remote = shlex.join(shell.words) if shell.words else "ssh"
    address = f"[{host}]" if ":" in host else host
    return (
        "rsync", "--archive", "--safe-links", "--mkpath", f"--timeout={_STALL_SECONDS}",
        *(f"--exclude={name}" for name in _LEFT_OUT), "--rsh", remote,
        "--", f"{folder}/", f"{address}:{folder}/",
    )  # fmt: skip


def sync_folder(folder: Path, hosts: Sequence[Host], shell: Shell) -> None:
    """Bring ``folder`` to every host but this one, several at a time.

    Raises:
        StartError: rsync is missing here, or a host did not take the folder.
    """
    others = [host.name for host in hosts if not host.is_local]
    for start in range(0, len(others), _AT_ONCE):
        _sync_batch(folder, others[start : start + _AT_ONCE], shell)


def _sync_batch(folder: Path, hosts: Sequence[str], shell: Shell) -> None:
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    try:
        for host in hosts:
            running.append((host, _start(sync_command(folder, host, shell))))
        for host, process in running:
            said = process.communicate()[1].decode(errors="replace")
            if process.returncode:
                raise StartError(_failure(host, folder, said))
    finally:
        for _, process in running:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(ValueError):
                process.communicate()


def _start(command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
    except OSError as error:
        raise StartError(f"cannot run rsync: {error.strerror}; install it on every host") from None


def _failure(host: str, folder: Path, said: str) -> str:
    if "rsync: command not found" in said or "rsync: not found" in said:
        return f"host {host}: rsync is missing there; install it on every host"
    own = [line for line in said.splitlines() if not line.startswith("rsync error: unexplained")]
    return f"host {host}: {explain(host, chr(10).join(own), f'copying {folder}')}"


def environment_folder() -> Path:
    """Return the folder of the Python environment that runs now, for --synchronise-python-venv.

    Raises:
        UsageError: this Python is no virtual environment.
    """
    if sys.prefix == sys.base_prefix:
        raise UsageError(
            "--synchronise-python-venv yes: this Python runs in no virtual environment; install "
            "the same Python and packages on every host"
        )
    return folder_to_sync(sys.prefix, "--synchronise-python-venv")
