"""Functions that create and check a pod's SQLite database, and that open transactions.

Each transaction opens its own connection, so a store can be used from any thread and after a fork.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from popdist_py.pods.folder.file_names import DATABASE, DATABASE_LOG, HOLDERS, MOVE_AWAY
from popdist_py.pods.model.pod_errors import DamagedError, PodError

SCHEMA_VERSION = 1
# The primary keys guarantee that an IPU belongs to at most one partition and has at most one
# holder.
_SCHEMA = """
CREATE TABLE layout (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    described TEXT NOT NULL,
    pod TEXT NOT NULL
);
CREATE TABLE partitions (
    name TEXT PRIMARY KEY,
    cluster TEXT NOT NULL,
    allocation TEXT NOT NULL,
    num_gcds INTEGER NOT NULL,
    num_ilds INTEGER NOT NULL,
    num_replicas INTEGER NOT NULL,
    reconfigurable INTEGER NOT NULL,
    sync_type TEXT NOT NULL,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    operation TEXT NOT NULL,
    began REAL NOT NULL,
    ready_at REAL NOT NULL,
    error TEXT NOT NULL,
    generation INTEGER NOT NULL
);
CREATE TABLE partition_ipus (
    agent TEXT NOT NULL,
    number INTEGER NOT NULL,
    partition TEXT NOT NULL REFERENCES partitions (name) ON DELETE CASCADE,
    position INTEGER NOT NULL,
    PRIMARY KEY (agent, number),
    UNIQUE (partition, position)
);
CREATE TABLE attachments (
    id TEXT PRIMARY KEY,
    partition TEXT NOT NULL REFERENCES partitions (name) ON DELETE CASCADE,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    user TEXT NOT NULL,
    program TEXT NOT NULL,
    run_id TEXT NOT NULL,
    since REAL NOT NULL,
    lock TEXT,
    renewed_until REAL,
    CHECK ((lock IS NULL) != (renewed_until IS NULL))
);
CREATE TABLE attached_ipus (
    partition TEXT NOT NULL,
    ipu INTEGER NOT NULL,
    attachment TEXT NOT NULL REFERENCES attachments (id) ON DELETE CASCADE,
    PRIMARY KEY (partition, ipu),
    FOREIGN KEY (partition, ipu) REFERENCES partition_ipus (partition, position) ON DELETE CASCADE
);
CREATE INDEX attached_by ON attached_ipus (attachment);
CREATE INDEX attached_to ON attachments (partition);
"""


def check_folder(folder: Path) -> None:
    """Check that a pod's folder exists, and that no other user owns it or can change it.

    A user who can write to the folder could replace the database. Root may use any user's folder.
    """
    try:
        found = folder.stat()
    except OSError as error:
        raise PodError(f"the pod's folder {folder} cannot be read: {error.strerror}") from None
    if not folder.is_dir():
        raise PodError(f"{folder} is a file, and the folder of a pod was expected")
    if os.geteuid() not in (0, found.st_uid):
        raise PodError(
            f"the pod's folder {folder} belongs to another user (user id {found.st_uid}): use your "
            "own pod, or the server of that user's pod (poprun-py-pod serve)"
        )
    if found.st_mode & 0o022:
        raise PodError(f"other users can change the pod's folder {folder}: run chmod go-w {folder}")


def make_database(folder: Path, described: str) -> None:
    """Make the database of a pod, unless another process makes it first.

    Args:
        folder: The pod's folder.
        described: The pod's description as JSON text.

    Raises:
        DamagedError: The database is missing, but its log exists. SQLite would apply this log to
            the new database.
        PodError: The folder cannot be written.
    """
    # The log must be checked before the database. Another process that makes the pod at the same
    # time makes the database before the log.
    if (folder / DATABASE_LOG).exists() and not (folder / DATABASE).exists():
        raise DamagedError(
            f"the pod's database {folder / DATABASE} is missing, but {DATABASE_LOG} with its last "
            f"changes exists: restore {DATABASE}, or move {DATABASE_LOG} to another folder to "
            "start with an empty database"
        )
    partial = folder / f".{DATABASE}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    try:
        (folder / HOLDERS).mkdir(mode=0o700, exist_ok=True)
        partial.touch(0o600, exist_ok=False)
    except OSError as error:
        raise PodError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        with _plain_errors(partial), contextlib.closing(_connect(partial, 0)) as connection:
            # With these settings, a crash may damage the file. The damage is harmless, because the
            # file gets its final name only when it is complete and on the disk.
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA journal_mode = MEMORY")
            connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION};")
            connection.execute("INSERT INTO layout VALUES (1, ?, ?)", (described, described))
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")
        _write_through(partial)
        if os.geteuid() == 0:
            owner = folder.stat()
            for path in (partial, folder / HOLDERS):
                os.chown(path, owner.st_uid, owner.st_gid)
        with contextlib.suppress(FileExistsError):
            os.link(partial, folder / DATABASE)
    except OSError as error:
        raise PodError(f"{folder} cannot be written: {error.strerror}") from None
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(OSError):
                Path(f"{partial}{suffix}").unlink()


def _write_through(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_integrity(folder: Path, busy_timeout: float) -> None:
    """Check the whole database if the size of its file differs from the size in its header.

    If the sizes are equal, the check is skipped to save time, because most programs make only a few
    calls. A later call that reads a damaged part raises DamagedError.

    Raises:
        DamagedError: The database is damaged.
    """
    file = folder / DATABASE
    if _has_its_size(file):
        return
    with _plain_errors(file), contextlib.closing(_connect(file, busy_timeout)) as connection:
        _check_version(file, connection)
        wrong = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if wrong != "ok":
            raise _damaged(file, str(wrong).splitlines()[-1])


def _has_its_size(file: Path) -> bool:
    """Return whether the size of a database file equals the size in its header.

    Bytes 16 and 17 of the header contain the size of a page, and bytes 28 to 31 the number of pages
    (https://sqlite.org/fileformat2.html#the_database_header).
    """
    try:
        with file.open("rb") as stream:
            header = stream.read(32)
            size = os.fstat(stream.fileno()).st_size
    except OSError:
        return False
    page_bytes = int.from_bytes(header[16:18], "big")
    return size > 0 and size == page_bytes * int.from_bytes(header[28:32], "big")


def _check_version(file: Path, connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise PodError(f"{file} was made by a newer version of poprun-py: install that version")
    if version != SCHEMA_VERSION:
        raise DamagedError(f"{file} is not the database of a pod: {MOVE_AWAY}")


@contextlib.contextmanager
def transaction(folder: Path, busy_timeout: float) -> Iterator[sqlite3.Connection]:
    """Yield a connection for writing; commit if the ``with`` block does not raise an exception.

    Only one process or thread at a time can be inside the ``with`` block.

    Args:
        folder: The pod's folder.
        busy_timeout: The longest time to wait for other writing processes, in seconds.

    Raises:
        PodError: The database is missing, busy or full, or this user must not write to it.
        DamagedError: The database cannot be read.
    """
    file = folder / DATABASE
    with _plain_errors(file), contextlib.closing(_connect(file, busy_timeout)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        # With ``synchronous = NORMAL``, a power failure may lose the last changes. If only a
        # process is killed, no changes are lost.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        try:
            # Each transaction checks the version of the file. A store may be open for days, and the
            # file may be replaced during this time.
            _check_version(file, connection)
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise


def _connect(file: Path, busy_timeout: float) -> sqlite3.Connection:
    # Unlike the default mode, mode=rw does not make an empty database if the file is missing.
    uri = f"{file.absolute().as_uri()}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, timeout=busy_timeout, isolation_level=None)
    connection.row_factory = sqlite3.Row
    return connection


@contextlib.contextmanager
def _plain_errors(file: Path) -> Iterator[None]:
    """Convert SQLite's errors into PodError."""
    try:
        yield
    except UnicodeDecodeError:
        raise _damaged(file, "a text in it is not UTF-8") from None
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_CONSTRAINT")):
            raise _damaged(file, str(error)) from None
        if not file.exists():
            raise PodError(
                f"the pod's database {file} does not exist, because the pod was removed: make the "
                "pod again"
            ) from None
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            why = "other processes were writing to the database for too long: try again"
        elif name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            why = f"{error}: free space on the disk of this file, and try again"
        elif name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            why = f"{error}: make the folder of this file writable"
        else:
            why = str(error)
        raise PodError(f"the pod's database {file} cannot be used: {why}") from None


def _damaged(file: Path, why: str) -> DamagedError:
    return DamagedError(
        f"the pod's database {file} is damaged ({why}), and nothing was changed: {MOVE_AWAY}"
    )
