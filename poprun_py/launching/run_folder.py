"""The folders of --output-dir, one for each run and one for each attempt.

    DIR/latest -> 20260131-120000-1a2b3c    the run that began last
    DIR/20260131-120000-1a2b3c/report.json
    DIR/20260131-120000-1a2b3c/attempt-1/

Existing files are never removed. The content of the report is decided by run_report.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from popdist_py.atomic_file import write_whole
from popdist_py.environment import RUN_ID, is_popdist_environment
from poprun_py.errors import UsageError

_LATEST, _REPORT = "latest", "report.json"
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ATTEMPT = re.compile(r"attempt-(\d+)")


def run_id(environ: Mapping[str, str]) -> str:
    """Return the name of a new run, which is the user's ``POPRUN_RUN_ID`` or a generated one.

    Generated names begin with the time in UTC, so runs of all hosts sort by time. Inside an
    instance of another job, the variable is that job's and is not used.

    Raises:
        UsageError: The user's name cannot be the name of a folder.
    """
    given = environ.get(RUN_ID, "")
    if not given or is_popdist_environment(environ):
        return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(3).hex()}"
    if not _FOLDER_NAME.fullmatch(given) or given == _LATEST:
        raise UsageError(
            f"{RUN_ID}={given[:80]!r}: expected the name of a folder: a letter or digit, then "
            f"letters, digits, '.', '_' and '-', at most 128 in all, and not {_LATEST!r}"
        )
    return given


class RunFolder:
    """The folder of one run, which only its owner can read, and its lock against other launchers.

    If the user named the run, the folder may exist. The run then continues with its next attempt.

    Args:
        parent: The folder of all runs, which is created if necessary.
        name: The name of the run.
        option: The name of the option for ``parent`` in messages.

    Attributes:
        trouble: A sentence about the last file that could not be written, or an empty string.

    Raises:
        UsageError: The folder cannot be created or written to, or a run of this name is running.
    """

    def __init__(self, parent: str, name: str, option: str = "--output-dir") -> None:
        self.path = Path(parent, name)
        self.trouble = ""
        self._parent = Path(parent)
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{option} {parent}: {error.strerror}") from None
        if not os.access(self.path, os.W_OK | os.X_OK):
            self.close()
            raise UsageError(f"{option} {parent}: files cannot be made in it")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UsageError(
                f"{RUN_ID}={name}: the run of this name in {parent} has not ended; wait for it, or "
                "give this one another name"
            ) from None
        except OSError:
            pass  # a file system without locks

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def link_latest(self) -> None:
        """Let the link ``latest`` point to this run; a file of the user with that name stays."""
        link = self._parent / _LATEST
        partial = self._parent / f".{_LATEST}.{self.path.name}"
        try:
            if link.exists() and not link.is_symlink():
                raise FileExistsError(None, "there is another file of that name")
            partial.symlink_to(self.path.name)
            partial.replace(link)
        except OSError as error:
            self.trouble = f"{self._parent} has no link {_LATEST}: {error.strerror}"
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def earlier_report(self) -> str | None:
        """Return the report of an earlier launch of this run; None without one.

        Raises:
            UsageError: The report cannot be read.
        """
        try:
            return (self.path / _REPORT).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError) as error:
            raise self.not_a_report(str(getattr(error, "strerror", None) or error)) from None

    def not_a_report(self, why: str) -> UsageError:
        """Return the error for a ``report.json`` that is not a report and must not be lost."""
        return UsageError(
            f"{self.path / _REPORT} is no report of a run ({why}): move it away, or give this run "
            f"another {RUN_ID}"
        )

    def make_attempt(self) -> tuple[int, Path]:
        """Create the folder of the next attempt; return its number, from 1, and its path.

        Raises:
            OSError: The folder cannot be created.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been removed
        numbers = [int(m[1]) for name in os.listdir(self.path) if (m := _ATTEMPT.fullmatch(name))]  # noqa: PTH208 (names)
        number = max(numbers, default=0) + 1
        path = self.path / f"attempt-{number}"
        path.mkdir(mode=0o700)
        return number, path

    def save_report(self, text: str, brief: str = "") -> None:
        """Replace ``report.json`` in one step.

        Args:
            text: The whole report.
            brief: The most important part of the report. If the disk is too full for a new file,
                this part overwrites the existing report.
        """
        report = self.path / _REPORT
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # it may have been removed
            write_whole(report, text)
        except OSError as error:
            self.trouble = f"{self.path} has no report: {error.strerror}"
            if brief and _overwrite(report, brief.encode()):
                self.trouble = f"{report} is shortened: {error.strerror}"


def _overwrite(path: Path, data: bytes) -> bool:
    """Overwrite a file in place if ``data`` fits into its disk blocks; return whether it did."""
    try:
        with path.open("r+b", buffering=0) as file:
            state = os.fstat(file.fileno())
            if len(data) > max(state.st_size, 512 * state.st_blocks):
                return False
            is_whole = file.write(data) == len(data)
            file.truncate()
            return is_whole
    except OSError:
        return False
