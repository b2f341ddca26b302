"""The files that a program leaves for its run, where the launcher is on another host.

They lie in a private folder of this host, and travel to the launcher when the program has ended.
Standard library only; imported by jobs with such files alone.
"""

import os
import zlib
from contextlib import suppress

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "instance"
_PART_BYTES = 1 << 19
# The files are mostly empty, or numbers that are alike: more effort saves little.
_COMPRESSION = 1


class ProgramFiles:
    """Where the program leaves files on this host.

    Args:
        told: by the launcher: the variables that a program finds its places in, and what their
            values begin with; the prefix of the paths follows.
    """

    def __init__(self, told: "dict[str, str]") -> None:
        self._told = told
        self._folder = ""
        base = os.environ.get("TMPDIR") or "/tmp"
        folder = os.path.join(base, f"poprun-files-{os.getpid()}-{os.urandom(6).hex()}")
        # Without a folder nothing is kept, as the run's own folder shows.
        with suppress(OSError):
            os.mkdir(folder, 0o700)
            self._folder = folder

    def variables(self) -> "dict[str, str]":
        """Return the variables that tell the program where to leave files."""
        if not self._folder:
            return {}
        prefix = os.path.join(self._folder, _NAME)
        return {name: begin + prefix for name, begin in self._told.items()}

    def send(self, send: "Callable[[bytes], None]") -> None:
        """Send every file in parts, each with its name, and remove them."""
        names = sorted(os.listdir(self._folder)) if self._folder else []
        for name in names:
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
            for name in os.listdir(self._folder):
                os.unlink(os.path.join(self._folder, name))
            os.rmdir(self._folder)
        self._folder = ""
