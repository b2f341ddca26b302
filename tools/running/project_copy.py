"""Commands in a copy of the project, so that the files they write stay out of the checkout.

A command that exceeds its time limit is stopped with its whole process group.
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

ROOT = Path(__file__).resolve().parents[2]

__all__ = ["Outcome", "ProjectCopy", "project_copy"]

#: Programs write beside themselves. These folders are therefore copied; all others are linked.
_COPIED = ("examples", "docs")
#: Variables of a surrounding job, shell or terminal that would change the output.
_SURROUNDINGS = re.compile(
    r"(POPDIST|POPRUN|OMPI|PMIX|PRTE|SLURM|POPLAR|IPUOF|POPTORCH|TORCHELASTIC)_"
    r"|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT|COLUMNS|LINES|FORCE_COLOR)$"
)
#: Lines of ``gc-info -l`` about another job: the name of its partition, and its devices.
_OTHER_PARTITION = re.compile(
    r"^Partition: (?!emulated ).*\n(?:(?:-\+-| \|---).*\n)*", re.MULTILINE
)
_GRACE = 15.0  # seconds for a launcher to end its instances


@dataclass(frozen=True)
class Outcome:
    """The final lines of a terminal, the exit code (None after the limit), and the duration."""

    lines: tuple[str, ...]
    code: int | None
    seconds: float

    def problem(self, expected: int, seconds: float) -> str | None:
        """Describe an unexpected exit code or a missed time limit, or return None."""
        if self.code is None:
            return f"did not end within {seconds:g} s"
        return None if self.code == expected else f"exit code {self.code}, expected {expected}"


@dataclass(frozen=True)
class ProjectCopy:
    """A copy of the project, and a data folder that its commands share."""

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
        """Run ``words`` in ``folder`` of the copy, with ``values`` in place of ``{names}``.

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
def project_copy() -> Iterator[ProjectCopy]:
    """Make a copy of the project, and remove it at the end and on SIGTERM."""
    before = signal.signal(signal.SIGTERM, _leave)
    with (
        contextlib.ExitStack() as after,
        tempfile.TemporaryDirectory(prefix="poprun-py-copy-") as name,
    ):
        after.callback(signal.signal, signal.SIGTERM, before)
        found = ProjectCopy(Path(name))
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
    """Insert the values. Other braces stay, such as those of JSON."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _end(process: subprocess.Popen) -> None:
    """Stop a command's process group. A launcher gets time to stop its instances."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
