"""The files that a program leaves for its run, and a note of when it ended.

Where the launcher is on another host, they lie in a private folder of this one, and travel to the
launcher when the program has ended.
Standard library only; imported by jobs with such files alone.
"""

import os
import time
from contextlib import suppress

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "instance"
_PART_BYTES = 1 << 19
# The files are mostly empty, or numbers that are alike: more effort saves little.
_COMPRESSION = 1


def note_end(prefix: str) -> None:
    """Write when the program ended, which is now, beside its files of spans: nanoseconds."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    with suppress(OSError), open(os.open(f"{prefix}.ended", flags, 0o600), "w") as file:
        file.write(str(time.monotonic_ns()))


class ProgramFiles:
    """Where the program leaves files on this host.

    Args:
        told: by the launcher: the variables that a program finds its places in, and what their
            values begin with; the prefix of the paths follows.
    """

    def __init__(self, told: "dict[str, str]") -> None:
        self._told = told
        self._folder = ""
        base = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")  # the program may leave this one
        folder = os.path.join(base, f"poprun-files-{os.getpid()}-{os.urandom(6).hex()}")
        # Without a folder nothing is kept, as the run's own folder shows.
        with suppress(OSError):
            os.mkdir(folder, 0o700)
            self._folder = folder

    @property
    def prefix(self) -> str:
        """What the paths of the program's files begin with; empty if there can be none."""
        return self._folder and os.path.join(self._folder, _NAME)

    def variables(self) -> "dict[str, str]":
        """Return the variables that tell the program where to leave files."""
        prefix = self.prefix
        return {name: begin + prefix for name, begin in self._told.items()} if prefix else {}

    def send(self, send: "Callable[[bytes], None]") -> None:
        """Send every file in parts, each with its name, and remove them."""
        import zlib

        for name in sorted(self._names()):
            with suppress(OSError), open(os.path.join(self._folder, name), "rb") as file:
                own = name.removeprefix(f"{_NAME}.").encode()
                while part := file.read(_PART_BYTES):
                    send(own + b"\0" + zlib.compress(part, _COMPRESSION))
        self.remove()

    def remove(self) -> None:
        """Remove the files of this host."""
        if not self._folder:
            return
        with suppress(OSError):
            for name in self._names():
                os.unlink(os.path.join(self._folder, name))
            os.rmdir(self._folder)
        self._folder = ""

    def _names(self) -> "list[str]":
        """Return the names of the files; none where the program removed their folder."""
        try:
            return os.listdir(self._folder) if self._folder else []
        except OSError:
            return []
