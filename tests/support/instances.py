"""A job of the launcher that stays alive for the session and runs functions by name.

Use the fixture ``instances`` of ``conftest.py``::

    def _sum(add):
        popdist_py.init()
        return popdist_py.all_reduce(popdist_py.getInstanceIndex() + add)

    def test_sums(instances):
        assert instances.run(_sum, 1) == [3, 3]

A job of two instances starts in about two seconds, most of which are imports of torch and of the
library. A call takes milliseconds. Each instance imports the test's file once and finds the
function there by its name, so the function has to stand at the top level of the file. Arguments and
values are pickled. Write the call as ``instances.run(``: ``conftest.py`` finds the files that have
these words and gives all of them to one worker, which starts the job once.

Tests may use this job for values that instances compute, exchange or refuse. The function restores
what it changes in its process: random seeds, numbers of threads, variables, patched names. It may
join the job with ``popdist_py.init()``, which does nothing the second time, and leave it with
``popdist_py.context.finalize()``; the next function then joins anew.

Tests of the start or the end of a job need a job of their own (the fixture ``poprun``), and so do
tests of exit codes, signals, restarts, the launcher's output, and variables that a program reads
when it starts.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.processes import survivors
from support.repository import ROOT

__all__ = ["InstanceFailedError", "Instances"]

_MOST_JOBS = 2
# In seconds, with room for a machine that is busy.
_START_LIMIT = 60.0
_END_LIMIT = 30.0
# After the first instance has failed, or should have ended itself.
_GRACE = 3.0
_ENDED = "ended"


class InstanceFailedError(AssertionError):
    """A function raised, ran over its limit, or ended its instance; the text says which."""


class Instances:
    """The jobs of a session, by number of instances and options; at most two are alive."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        """Start nothing yet.

        Args:
            folder: for the jobs' output and leases.
            environ: variables of every job.
        """
        self._folder = folder
        self._environ = dict(environ)
        self._jobs: dict[tuple[object, ...], _Job] = {}

    def run(
        self,
        function: Callable[..., Any],
        *args: object,
        count: int = 2,
        replicas: int = 1,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        limit: float = 110.0,
    ) -> list[Any]:
        """Return what ``function(*args)`` returns on each instance, by instance index.

        A failure ends the job, and the next call starts a fresh one.

        Args:
            function: at the top of a file.
            args: for the function.
            count: number of instances.
            replicas: number per instance.
            options: more words for the launcher.
            environ: variables that the job starts with.
            limit: seconds for the function.

        Raises:
            InstanceFailedError: the function raised, hung, or ended its instance.
        """
        key = (count, replicas, tuple(options), tuple(sorted((environ or {}).items())))
        job = self._jobs.pop(key, None)
        if job is None:
            while len(self._jobs) >= _MOST_JOBS:
                self._jobs.pop(next(iter(self._jobs))).close()
            words = [
                *("--num-instances", count, "--num-replicas", count * replicas),
                *("--oversubscribe", *options),
            ]
            job = _Job(count, words, self._folder, {**self._environ, **(environ or {})})
        self._jobs[key] = job  # at the end of the dict: it was used last
        try:
            return job.run(function, args, limit)
        except BaseException:
            self._jobs.pop(key).kill()
            raise

    def close(self) -> None:
        """End the jobs that are alive."""
        while self._jobs:
            self._jobs.popitem()[1].close()


# The value that the function returned, and the traceback of its error or "".
_Reply = tuple[Any, str]


class _Job:
    """One job: its launcher, and a connection to each of its instances."""

    def __init__(
        self, count: int, words: list[object], folder: Path, environ: dict[str, str]
    ) -> None:
        # Every process of the job has this variable: survivors are found by it.
        self._mark = f"TEST_MARK_OF_INSTANCES={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = self._mark.partition("=")
        self._instances: list[Connection] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        # A folder with a short name: paths of Unix sockets have at most 107 bytes.
        with (
            tempfile.TemporaryDirectory(prefix="job-") as place,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(f"{place}/s")
            listener.listen(count)
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "poprun_py", *map(str, words), "-m", __name__, f"{place}/s"],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={
                    **environ,
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                    # Other jobs of the session must not wait for the cores of this one.
                    "POPRUN_LEASES": "none",
                    name: value,
                },
                start_new_session=True,
            )
            try:
                self._accept(listener, count)
            except BaseException as error:
                error.add_note(self.kill().decode(errors="replace"))
                raise

    def _accept(self, listener: socket.socket, count: int) -> None:
        listener.settimeout(0.2)
        end = time.monotonic() + _START_LIMIT
        found: dict[int, Connection] = {}
        while len(found) < count:
            if self._launcher.poll() is not None or time.monotonic() > end:
                raise InstanceFailedError("the job did not start")
            with contextlib.suppress(TimeoutError):
                accepted = listener.accept()[0]
                accepted.setblocking(True)
                instance = Connection(accepted.detach())
                self._instances.append(instance)
                found[instance.recv()] = instance
        self._instances = [found[index] for index in range(count)]

    def run(
        self, function: Callable[..., Any], args: tuple[object, ...], limit: float
    ) -> list[Any]:
        """Return what the function returns on each instance."""
        begin = os.fstat(self._output.fileno()).st_size
        data = pickle.dumps((function.__code__.co_filename, function.__name__, args, limit))
        for instance in self._instances:
            with contextlib.suppress(OSError):  # it has ended, and gives no reply
                instance.send_bytes(data)
        replies = self._replies(limit)
        errors = [f"instance {index}: {error}" for index, (_, error) in enumerate(replies) if error]
        if not errors:
            return [value for value, _ in replies]
        if (None, _ENDED) in replies:
            # The launcher says how the instance ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(_GRACE)
        printed = self.kill()[begin:].decode(errors="replace")
        raise InstanceFailedError("\n".join([f"{function.__name__} failed", *errors, printed]))

    def _replies(self, limit: float) -> list[_Reply]:
        # An instance ends itself at the limit.
        end = time.monotonic() + limit + _GRACE
        replies: list[_Reply] = [(None, "no value")] * len(self._instances)
        waiting = {instance: index for index, instance in enumerate(self._instances)}
        while waiting and (left := end - time.monotonic()) > 0:
            for instance in wait(list(waiting), left):
                index = waiting.pop(instance)
                try:
                    replies[index] = instance.recv()
                except (EOFError, OSError):
                    replies[index] = (None, _ENDED)
                if replies[index][1]:
                    # The other instances may wait for this one until their limit.
                    end = min(end, time.monotonic() + _GRACE)
        return replies

    def close(self) -> None:
        """End the job: its instances return from their program."""
        for instance in self._instances:
            # Closing ends nothing while a process that a test has forked holds the connection too.
            with socket.socket(fileno=os.dup(instance.fileno())) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            instance.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_END_LIMIT)
        code = self._launcher.poll()
        printed = self.kill().decode(errors="replace")
        assert code == 0, f"a job of the session ended with {code}\n{printed}"

    def kill(self) -> bytes:
        """End every process of the job at once; return what the job has printed."""
        if self._output.closed:
            return b""
        for instance in self._instances:
            instance.close()
        if self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(_END_LIMIT)
        if self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()
        end = time.monotonic() + _END_LIMIT
        while left := survivors(self._mark):
            for pid in left if time.monotonic() > end else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        with self._output:
            # The job wrote at the same position of the file.
            self._output.seek(0)
            return self._output.read()


def _be_an_instance(address: str) -> None:
    """Run functions until the connection ends."""
    with socket.socket(socket.AF_UNIX) as connecting:
        connecting.connect(address)
        connection = Connection(connecting.detach())
    connection.send(int(os.environ["RANK"]))
    programs: dict[str, Any] = {}
    with contextlib.suppress(EOFError, OSError):
        while True:
            connection.send_bytes(_reply_to(connection.recv_bytes(), programs))


def _reply_to(request: bytes, programs: dict[str, Any]) -> bytes:
    instance = os.getpid()
    path, name, args, limit = pickle.loads(request)
    # This ends the instance at the limit, so that no instance outlives a session that was
    # killed. faulthandler's own timer would block processes that the function forks.
    watch = threading.Timer(limit, _give_up)
    watch.daemon = True
    watch.start()
    try:
        if path not in programs:
            spec = importlib.util.spec_from_file_location(f"program_{len(programs)}", path)
            programs[path] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(programs[path])
        return pickle.dumps((getattr(programs[path], name)(*args), ""))
    except BaseException:
        if os.getpid() != instance:
            raise  # a process that the function forked ends as a program does
        return pickle.dumps((None, traceback.format_exc()))
    finally:
        watch.cancel()
        sys.stdout.flush()
        sys.stderr.flush()


def _give_up() -> None:
    print("Timeout!", file=sys.stderr)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(1)


if __name__ == "__main__":
    _be_an_instance(sys.argv[1])
