"""Runs a command as a reader does, for the pages and figures of the texts.

A command runs in a copy of the project, so that what it writes stays out of the checkout, and ends
within its time: after that its whole process group is ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tools.running.own_commands import make_commands
from tools.running.printed import visible

ROOT = Path(__file__).resolve().parents[3]

__all__ = ["ROOT", "Outcome", "Place", "place"]

#: Programs write beside themselves: these folders are copied, all else is linked.
_COPIED = ("examples", "docs")
#: What a surrounding job, shell or terminal might have set, which changes what is printed.
_SURROUNDINGS = re.compile(
    r"(POPDIST|POPRUN|OMPI|PMIX|PRTE|SLURM|POPLAR|IPUOF|POPTORCH|TORCHELASTIC)_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|COLUMNS|LINES|FORCE_COLOR)$"
)
#: What ``gc-info -l`` lists of another job: the name of its partition, and a line for each device.
_OTHER_PARTITION = re.compile(
    r"^Partition: (?!emulated ).*\n(?:(?:-\+-| \|---).*\n)*", re.MULTILINE
)
_GRACE = 15.0  # seconds for a launcher to end its instances


@dataclass(frozen=True)
class Outcome:
    """The lines that a terminal shows in the end, the exit code (None after the limit), seconds."""

    lines: tuple[str, ...]
    code: int | None
    seconds: float

    def problem(self, expected: int, seconds: float) -> str | None:
        """Say what is not as expected, or None."""
        if self.code is None:
            return f"did not end within {seconds:g} s"
        return None if self.code == expected else f"exit code {self.code}, expected {expected}"


@dataclass(frozen=True)
class Place:
    """A copy of the project, and what its commands share."""

    folder: Path

    @property
    def project(self) -> Path:
        """The copy."""
        return self.folder / "poprun-py"

    @property
    def data(self) -> Path:
        """A folder that all commands share."""
        return self.folder / "data"

    def run(
        self,
        words: Sequence[str],
        folder: str,
        values: Mapping[str, str],
        seconds: float,
        *,
        compiling: bool = False,
    ) -> Outcome:
        """Run ``words`` in ``folder`` of the copy, after putting in the values of ``{names}``.

        With ``compiling``, the lines include the complete progress bars of compilations.
        """
        command = [_filled(word, {"data": str(self.data), **values}) for word in words]
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self.project / folder, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env=self._environ(), start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
            output.seek(0)
            text = output.read().decode(errors="replace")
        lines = tuple(visible(self._without_places(text, values), compiling=compiling))
        return Outcome(lines, code, time.monotonic() - began)

    def _environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not _SURROUNDINGS.match(name)}
        commands = f"{self.folder / 'bin'}:{Path(sys.executable).parent}"
        return {
            **kept,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.project),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }

    def _without_places(self, text: str, values: Mapping[str, str]) -> str:
        """Remove the folders of this run, the name of its machine, and other jobs on it."""
        for name, path in {
            **values,
            "data": str(self.data),
            "poprun-py": str(self.project),
        }.items():
            text = text.replace(path, name)
        text = text.replace(str(ROOT), "poprun-py")
        text = re.sub(r", in use by: \[[\d ]+\]", "", _OTHER_PARTITION.sub("", text))
        return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "localhost", text)


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """Make a copy of the project; afterwards it is gone, also if this program is asked to end."""
    before = signal.signal(signal.SIGTERM, _leave)
    with (
        contextlib.ExitStack() as after,
        tempfile.TemporaryDirectory(prefix="poprun-py-pages-") as name,
    ):
        after.callback(signal.signal, signal.SIGTERM, before)
        found = Place(Path(name))
        found.project.mkdir()
        found.data.mkdir()
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
        for path in ROOT.iterdir():
            if path.name in _COPIED:
                shutil.copytree(path, found.project / path.name, ignore=unwanted)
            elif not path.name.startswith("."):
                (found.project / path.name).symlink_to(path)
        make_commands(ROOT, found.folder / "bin")
        yield found


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Put the values in; other braces, as of JSON, stay."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _end(process: subprocess.Popen) -> None:
    """End what is left of a command's process group; a launcher ends its instances itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
