"""The files that a program leaves for its run or is given, and a note of when it ended.

Where the launcher is on another host, they lie in a private folder of this one, and travel to the
launcher when the program has ended.
Standard library only; imported by jobs with such files alone.
"""

import os
import time
from contextlib import suppress

from poprun_py.instance.job_folders import JobFolder, folder_name

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = "instance"
_PART_BYTES = 1 << 19
# The files are mostly empty, or numbers that are alike: more effort saves little. What a function
# returned may be large and is seldom alike: networks are quicker than zlib.
_COMPRESSION = 1
_UNCOMPRESSED = (b"result", b"failure")


def note_end(prefix: str) -> None:
    """Write when the program ended, which is now, beside its files of spans: nanoseconds."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    with suppress(OSError), open(os.open(f"{prefix}.ended", flags, 0o600), "w") as file:
        file.write(str(time.monotonic_ns()))


def _private_path() -> str:
    """Return a path for what this process keeps; the program may leave this folder."""
    base = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    return os.path.join(base, folder_name(f"files-{os.getpid()}"))


class GivenFile:
    """A file that the launcher sends for the program: it has no name, and so is never left over."""

    def __init__(self) -> None:
        self._problem = ""
        self._descriptor = -1
        path = _private_path()
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(path)
        except OSError as error:
            self._problem = f"{os.path.dirname(path)}: {error.strerror}"

    def add(self, part: bytes) -> None:
        """Add a part; after the first problem they are dropped."""
        try:
            while part and not self._problem:
                part = part[os.write(self._descriptor, part) :]
        except OSError as error:
            self._problem = error.strerror or str(error)

    def answer(self) -> "dict[str, str]":
        """Return the path at which the program finds the whole file, or what the problem is."""
        if self._problem:
            return {"problem": self._problem}
        os.set_inheritable(self._descriptor, True)
        return {"path": f"/proc/self/fd/{self._descriptor}"}

    def close(self) -> None:
        """Forget the file: the program has it now."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ProgramFiles:
    """Where the program leaves files on this host.

    Args:
        told: by the launcher: the variables that a program finds its places in, and what their
            values begin with; the prefix of the paths follows.
    """

    def __init__(self, told: "dict[str, str]") -> None:
        self._told = told
        self._held: JobFolder | None = None
        # Without a folder nothing is kept, as the run's own folder shows.
        with suppress(OSError):
            self._held = JobFolder.make(*os.path.split(_private_path()))

    @property
    def prefix(self) -> str:
        """What the paths of the program's files begin with; empty if there can be none."""
        return os.path.join(self._held.path, _NAME) if self._held is not None else ""

    def variables(self) -> "dict[str, str]":
        """Return the variables that tell the program where to leave files."""
        prefix = self.prefix
        return {name: begin + prefix for name, begin in self._told.items()} if prefix else {}

    def parts(self) -> "Iterator[bytes]":
        """Return every file in parts to be sent, each with its name; at the end they are gone."""
        import zlib

        # What begins with a dot was being written when the program was killed.
        for name in sorted(name for name in self._names() if not name.startswith(".")):
            path = f"{self.prefix.removesuffix(_NAME)}{name}"
            with suppress(OSError), open(path, "rb") as file:
                own = name.removeprefix(f"{_NAME}.").encode()
                effort = 0 if own in _UNCOMPRESSED else _COMPRESSION
                while part := file.read(_PART_BYTES):
                    yield own + b"\0" + zlib.compress(part, effort)
        self.remove()

    def remove(self) -> None:
        """Remove the files of this host."""
        if self._held is not None:
            self._held.remove()
        self._held = None

    def _names(self) -> "list[str]":
        """Return the names of the files; none where the program removed their folder."""
        try:
            return os.listdir(self._held.path) if self._held is not None else []
        except OSError:
            return []
