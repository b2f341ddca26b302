"""Files that travel between the launcher's host and the host of an instance.

The launcher may send one file before the program starts. The program writes files into a private
folder of its host, and the wrapper sends them to the launcher after the program's end.
"""

import os
import time
from contextlib import suppress

from poprun_py.instance.job_folders import JobFolder, folder_name

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = "instance"
_PART_BYTES = 1 << 19
# The level of compression is low, because most files are almost empty or contain similar numbers.
_COMPRESSION = 1
# Files with results of Python functions are not compressed: they may be large and seldom shrink,
# and networks are faster than zlib.
_UNCOMPRESSED = (b"result", b"failure")


def write_end_time(prefix: str) -> None:
    """Write the current time of the monotonic clock into a file beside the program's span files."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
    with suppress(OSError), open(os.open(f"{prefix}.ended", flags, 0o600), "w") as file:
        file.write(str(time.monotonic_ns()))


def _private_path() -> str:
    # The path is absolute, because the program may change its working folder.
    base = os.path.abspath(os.environ.get("TMPDIR") or "/tmp")
    return os.path.join(base, folder_name(f"files-{os.getpid()}"))


class ReceivedFile:
    """A file from the launcher for the program, without a path, so that no file is left behind."""

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
        """Append a part of the file; after the first write error, all parts are dropped."""
        try:
            while part and not self._problem:
                part = part[os.write(self._descriptor, part) :]
        except OSError as error:
            self._problem = error.strerror or str(error)

    def answer(self) -> "dict[str, str]":
        """Return the ``path`` of the file, or the ``problem``, as a dictionary for the launcher."""
        if self._problem:
            return {"problem": self._problem}
        os.set_inheritable(self._descriptor, True)
        return {"path": f"/proc/self/fd/{self._descriptor}"}

    def close(self) -> None:
        """Close the file in the wrapper; the program, which has started, keeps the file open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class SentFiles:
    """The folder for the program's files that the wrapper sends to the launcher.

    The paths of the program's files begin with ``prefix``. If the folder cannot be made, ``prefix``
    is empty and no files are sent.
    """

    def __init__(self) -> None:
        self._folder: JobFolder | None = None
        self.prefix = ""
        with suppress(OSError):
            self._folder = JobFolder.make(*os.path.split(_private_path()))
            self.prefix = os.path.join(self._folder.path, _NAME)

    def variables(self, beginnings: "dict[str, str]") -> "dict[str, str]":
        """Return the environment variables that tell the program where to write files.

        ``beginnings`` contains the text before the prefix in the value of each variable.
        """
        prefix = self.prefix
        return {name: each + prefix for name, each in beginnings.items()} if prefix else {}

    def parts(self) -> "Iterator[bytes]":
        """Yield the parts of every file, each with the file's name, and then remove the files."""
        import zlib

        folder, names = os.path.dirname(self.prefix), list[str]()
        with suppress(OSError):  # The program may have removed the folder of its files.
            # A file whose name begins with a dot was incomplete when the program was killed.
            names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
        for name in names:
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                short_name = name.removeprefix(f"{_NAME}.").encode()
                effort = 0 if short_name in _UNCOMPRESSED else _COMPRESSION
                while part := file.read(_PART_BYTES):
                    yield short_name + b"\0" + zlib.compress(part, effort)
        self.remove()

    def remove(self) -> None:
        """Remove the folder and its files."""
        if self._folder is not None:
            self._folder.remove()
