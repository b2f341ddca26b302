"""The files in which a program records its timeline, where the launcher is on another host.

They lie in a private folder of this host, and travel to the launcher when the program has ended.
Standard library only; imported by jobs with a timeline alone.
"""

import os
import time
import zlib
from contextlib import suppress

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NAME = "instance"
_PART_BYTES = 1 << 19
# The files are mostly empty, or numbers that are alike: more effort saves little.
_COMPRESSION = 1


class TimelineFiles:
    """Where the program records.

    Args:
        told: by the launcher: the bytes of all files and, on its own host, their place.
    """

    def __init__(self, told: "dict[str, Any]") -> None:
        self._bytes = int(told["bytes"])
        self._folder = ""
        self._prefix = str(told.get("prefix", ""))
        if not self._prefix:
            base = os.environ.get("TMPDIR") or "/tmp"
            folder = os.path.join(base, f"poprun-timeline-{os.getpid()}-{os.urandom(6).hex()}")
            # Without a folder nothing is recorded, as the trace shows.
            with suppress(OSError):
                os.mkdir(folder, 0o700)
                self._folder = folder
                self._prefix = os.path.join(folder, _NAME)

    def variables(self) -> dict[str, str]:
        """Return the variable that tells the program where to record."""
        return {"POPDIST_TIMELINE": f"{self._bytes}:{self._prefix}"} if self._prefix else {}

    def program_ended(self) -> None:
        """Note when, for what the program had begun by then."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        with suppress(OSError), open(os.open(f"{self._prefix}.ended", flags, 0o600), "w") as file:
            file.write(str(time.monotonic_ns()))

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
