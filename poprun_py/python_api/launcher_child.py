"""Starting a job's launcher process, and reading its messages in the calling program.

``LauncherChild`` starts the process, sends it a request, and reads its messages and its output in a
thread until the process has ended.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO

from poprun_py.errors import JobFailedError, LaunchError, StartError, start_errors
from poprun_py.python_api.messages import Attempt, Channel, JobRequest
from poprun_py.python_api.shown_output import ShownOutput
from poprun_py.running.supervise.launch_result import Cause, LaunchResult, describe
from poprun_py.running.supervise.launcher_folder import remove_launcher_folders
from poprun_py.running.supervise.signal_pipe import ENDING, ONCE

# A standard stream of the launcher process: a descriptor, a constant of subprocess such as PIPE, a
# file to append to, or None to inherit the stream of this process.
Stream = int | Path | None
_CHUNK_BYTES = 1 << 16
# The seconds between two looks at the size of the file with the shown output.
_PAUSE_SECONDS = 1.0
_PROGRAM = str(Path(__file__).with_name("launcher_process.py"))


class LauncherChild:
    """A launcher process that this program has started.

    Args:
        name: The name of the job in errors and thread names.
        request: The request to send to the process.
        streams: The standard input, output and error of the process. The output of a stream that
            is a pipe is written to ``sys.stdout`` or ``sys.stderr``.
        is_in_front: Whether the process gets the signals of this terminal's keys, such as Ctrl-C.
        output_file: The file with the shown output of a job in the background. Output that the
            process writes to pipes is copied to this file.
        listeners: The functions that take log lines, warnings and bindings, keyed by the kind of
            message.

    Attributes:
        outcome: A future with the job's result or LaunchError, set when the launcher process has
            ended.
        began_at: The time when the launcher process started, in seconds of ``time.monotonic()``.
        ended_at: The time when the launcher process ended, in seconds of ``time.monotonic()``.
        attempts: The attempts of the job that have begun; a restart begins a new attempt.
        waits_for: The resources that the job waits for, as text; empty if the job does not wait.

    Raises:
        StartError: The process cannot be started, or its messages and output cannot be read.
    """

    def __init__(
        self,
        name: str,
        request: JobRequest,
        streams: tuple[Stream, Stream, Stream],
        *,
        is_in_front: bool,
        output_file: Path | None,
        listeners: Mapping[str, Callable[[str], object]],
    ) -> None:
        self.outcome: Future[LaunchResult] = Future()
        self.outcome.set_running_or_notify_cancel()  # the future can no longer be cancelled
        self.ended_at = 0.0
        self.attempts: list[Attempt] = []
        self.waits_for = ""
        self._listeners = listeners
        self._reported: LaunchResult | LaunchError | None = None
        self._copiers: list[OutputCopier] = []
        self._shown = None if output_file is None else ShownOutput(output_file)
        with start_errors("the launcher's process cannot be started"):
            self._channel, theirs = Channel.pair()
        self.began_at = time.monotonic()
        try:
            self._process = _start_process(theirs.fileno(), streams, is_in_front=is_in_front)
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()
        thread = threading.Thread(target=self._listen, name=f"poprun_py job {name}", daemon=True)
        pipes = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        try:
            for stream, pipe in pipes.items():
                if pipe is not None:
                    self._copiers.append(OutputCopier(pipe, stream, output_file))
            self._channel.send("request", request)
            thread.start()
        except (OSError, RuntimeError) as error:
            # A limit of open files or threads is reached, or Python is shutting down.
            self.disconnect()
            for pipe in pipes.values():
                if pipe is not None:  # perhaps no OutputCopier has closed the pipe
                    pipe.close()
            self._finish()
            raise StartError(f"the job {name} cannot be monitored: {error}") from None
        except BaseException:  # Ctrl-C: the thread may already run
            self.abandon()
            raise

    @property
    def pid(self) -> int:
        """The process id of the launcher process."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send the launcher process a signal; do nothing if the process has ended."""
        self._process.send_signal(number)

    def abandon(self) -> None:
        """Shut down the channel: the launcher process ends its job, and the reading thread ends."""
        self._channel.shut_down()

    def disconnect(self) -> None:
        """Close the channel and the pipes; the launcher process then ends its job.

        If a forked process calls this method, it closes only its own copies of the descriptors, so
        the process that started the job stays connected.
        """
        self._channel.close()
        for copier in self._copiers:
            copier.close()

    def _listen(self) -> None:
        try:
            # Unpickling a result imports the module job_view. Import it here, because an import
            # while Python shuts down after Ctrl-C would keep the signal from ending this process.
            import poprun_py.running.watch.job_view  # noqa: F401

            with selectors.DefaultSelector() as selector:
                selector.register(self._channel, selectors.EVENT_READ, self._take_message)
                for copier in self._copiers:
                    selector.register(copier, selectors.EVENT_READ, copier.copy)
                pause = None if self._shown is None else _PAUSE_SECONDS
                while self._channel in selector.get_map():
                    for key, _ in selector.select(pause):
                        if not key.data():
                            selector.unregister(key.fileobj)
                    if self._shown is not None:
                        self._shown.free_old_part()
            self._wait()
            for copier in self._copiers:
                while copier.copy():
                    pass
        finally:  # If reading failed, closing the channel makes the launcher end its job.
            self.disconnect()
            self._finish()

    def _take_message(self) -> bool:
        """Handle one message of the launcher process; return False if the channel is closed."""
        message = self._channel.receive()
        if message is None:
            return False
        kind, value = message
        if kind in ("result", "error"):
            self._reported = value
        elif kind == "waiting":
            self.waits_for = value
        elif kind == "attempt":
            self.attempts.append(value)
        elif kind in self._listeners:
            try:
                self._listeners[kind](value)
            except Exception:
                # An error in the caller's function must not stop the thread that reads messages.
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
        return True

    def _wait(self) -> int:
        """Wait for the end of the launcher process; return its exit code, or -N for signal N."""
        # The calling program's handler of SIGCHLD may have waited for the launcher process already.
        with contextlib.suppress(ChildProcessError):
            # With WNOWAIT, the ended launcher process keeps its id, so no other process gets the
            # id.
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            if ended is not None and ended.si_code != os.CLD_EXITED:
                remove_launcher_folders(self.pid)
        return self._process.wait()

    def _finish(self) -> None:
        """Wait for the end of the launcher process and set the outcome."""
        code = self._wait()
        self.ended_at = time.monotonic()
        reported = self._reported or self._lost(code)
        if isinstance(reported, LaunchError):
            self.outcome.set_exception(reported)
        else:
            self.outcome.set_result(reported)

    def _lost(self, code: int) -> LaunchError:
        """Return the error for a launcher process that ended without a result."""
        reason = f"the launcher ended with {describe(code)}"
        if not self.attempts:
            return StartError(f"{reason} before the programs started")
        exit_code = 128 - code if code < 0 else code or 1
        return JobFailedError(
            f"{reason}, so the instances of the job were ended",
            LaunchResult(
                exit_code=exit_code,
                reason=reason,
                cause=Cause.MPIRUN_ENDED,
                run_id=self.attempts[-1].run_id,
            ),
        )


def _start_process(
    descriptor: int, streams: tuple[Stream, Stream, Stream], *, is_in_front: bool
) -> subprocess.Popen[bytes]:
    """Start a launcher process that inherits ``descriptor``, its end of the channel."""
    # The launcher process starts with the ending signals blocked, and unblocks them when it has
    # installed its signal handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*ENDING, *ONCE))
    try:
        with (
            start_errors("the launcher's process cannot be started"),
            contextlib.ExitStack() as files,
        ):
            stdin, stdout, stderr = (
                files.enter_context(each.open("ab")) if isinstance(each, Path) else each
                for each in streams
            )
            return subprocess.Popen(
                [sys.executable, "-P", _PROGRAM, str(descriptor)],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(descriptor,),
                process_group=None if is_in_front else 0,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class OutputCopier:
    """Copies output from a pipe to ``sys.stdout`` or ``sys.stderr``, and to a file if one is given.

    The stream is looked up in ``sys`` for every piece of output, because the program may replace
    the stream.
    """

    def __init__(self, pipe: IO[bytes], name: str, file: Path | None) -> None:
        self._pipe = pipe
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._file = None if file is None else file.open("ab", buffering=0)
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor of the pipe, which is readable when there is output."""
        return self._pipe.fileno()

    def copy(self) -> bool:
        """Copy one piece of output; return False if the pipe is empty or closed."""
        try:
            data = os.read(self._pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return False
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the job
                self._file.write(data)
        if text := self._decoder.decode(data, final=not data):
            # The program may have replaced the stream by an object that raises any exception.
            with contextlib.suppress(Exception):
                stream = getattr(sys, self._name)
                stream.write(text)
                stream.flush()
        return bool(data)

    def close(self) -> None:
        """Close the pipe and the file."""
        self._pipe.close()
        if self._file is not None:
            self._file.close()
