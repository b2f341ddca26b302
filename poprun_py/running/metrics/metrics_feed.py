"""The metrics of a running job, sent to child processes as JSON documents.

EndpointRecorder sends metrics to the endpoint of --metrics-port, and ChartRecorder to the process
that writes to TensorBoard or Weights & Biases. Sending metrics never delays the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from poprun_py.errors import StartError, UsageError, explain_os_error
from poprun_py.running.watch.instance_state import InstanceState, median
from poprun_py.running.watch.job_view import JobView
from poprun_py.running.watch.phases import ACTIVITIES
from poprun_py.running.watch.records import StepRecord

_ROOT: Final = Path(__file__).resolve().parents[3]
# The child process runs this code. The code appends the folder of the launcher's packages to the
# end of sys.path, so that modules in this folder do not hide modules of the standard library.
# Python's option -P keeps the working folder out of sys.path.
_START: Final = (
    "import importlib, sys; sys.path.append(sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main()"
)
# The size in bytes of the pipe to the child process. While the child process is busy, the pipe
# holds some hundred documents. The kernel gives larger pipes only to privileged processes.
_PIPE_BYTES: Final = 1 << 20
# If the child process still runs _SAID_SECONDS after the end of the job, the user is told to wait.
# If the child process still runs after _END_SECONDS, it is killed.
_SAID_SECONDS, _END_SECONDS = 2.0, 30.0
_READ_BYTES: Final = 1 << 16
# The upper bounds of histogram buckets, in seconds: 1, 2.5 and 5 times each power of ten, as is
# usual with Prometheus.
BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0),
)
_HOST: Final = "127.0.0.1"
_WAITING_CONNECTIONS: Final = 128
# The smallest number of seconds between two documents for charts. Periodic views of a job are at
# least one second apart, so each view is sent.
_APART_SECONDS: Final = 0.9
# If a job has more instances than this, charts show only the smallest, the median and the largest
# value of all instances.
_MOST_INSTANCES: Final = 32
_INSTANCE_VALUES: Final[Mapping[str, Callable[[InstanceState], float | None]]] = {
    "loss": lambda state: state.loss,
    "step_seconds": lambda state: state.step_seconds if state.num_steps else None,
    "step_p95_seconds": lambda state: state.p95_seconds if state.num_steps else None,
    "step_own_seconds": lambda state: state.own_seconds if state.num_steps else None,
    "memory_bytes": lambda state: float(state.memory_bytes) or None,
}


# --- child process --------------------------------------------------------------------------------


class MetricsProcess:
    """A child process that receives metrics as JSON documents, and serves or writes them.

    The child process ends when the launcher closes the pipe to it or is killed. Before the child
    process ends, it prints sentences about its problems, one per line.

    Args:
        module: The name of the module whose function ``main`` runs in the child process.
        what: The name of the child process in messages, such as ``the metrics for TensorBoard``.

    Raises:
        StartError: The child process cannot be started.
    """

    def __init__(
        self,
        module: str,
        what: str,
        first: Mapping[str, Any],
        *,
        environ: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> None:
        self._what = what
        self._rest = memoryview(b"")  # the unsent part of the last document
        self._num_sent = self._num_dropped = 0
        self._is_open = True
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-c", _START, str(_ROOT), module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=dict(environ),
                pass_fds=tuple(pass_fds),
                umask=0o077,
                # Ctrl-C and Ctrl-Z must not reach the child process, because the launcher sends the
                # last metrics after Ctrl-C.
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(explain_os_error(error, f"{what} cannot start")) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        for descriptor in (self._input, self._output):
            os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._input, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.send(first)

    def send(self, document: Mapping[str, Any] | str) -> bool:
        """Send a document to the child process; return whether the document was sent.

        If the child process is too slow, the document is dropped. A document that is a string must
        be JSON without line breaks.
        """
        self._num_sent += 1
        self._write()
        if self._rest or not self._is_open:
            self._num_dropped += 1
            return False
        if not isinstance(document, str):
            document = json.dumps(document, separators=(",", ":"))
        self._rest = memoryview(document.encode() + b"\n")
        self._write()
        return True

    def continue_sending(self) -> None:
        """Send more of the last document if the whole document did not fit into the pipe."""
        if self._rest:
            self._write()

    def finish(self, tell: Callable[[str], None]) -> list[str]:
        """Wait until the child process has ended; return sentences about its problems.

        The function ``tell`` shows a message to the user.
        """
        began, said, was_told = time.monotonic(), b"", False
        is_killed = True  # set to False if the child process ends in time
        try:
            while (seconds := time.monotonic() - began) < _END_SECONDS:
                self._write()
                if not self._rest:
                    self._close_input()
                if seconds > _SAID_SECONDS and not was_told:
                    was_told = True
                    tell(f"waiting for {self._what}, {_END_SECONDS:.0f} s at most")
                ready, _, _ = select.select([self._output], [], [], 0.05)
                if ready:
                    data = os.read(self._output, _READ_BYTES)
                    said += data
                    if not data:
                        is_killed = False
                        break
        except KeyboardInterrupt:  # the job has ended, and the user does not want to wait
            pass
        return [*said.decode(errors="replace").splitlines(), *self._end(is_killed)]

    def close(self) -> None:
        """Kill the child process if it has not ended."""
        if self._process.returncode is None:
            self._end(True)

    def _end(self, is_killed: bool) -> list[str]:
        self._close_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if not is_killed:
                self._process.wait(1)
        if self._process.poll() is None:
            is_killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        troubles = []
        if is_killed:
            troubles.append(f"{self._what} did not end in time: the last metrics may be missing")
        elif self._process.returncode:
            troubles.append(f"{self._what} ended early, with exit code {self._process.returncode}")
        elif self._num_dropped:
            missing = f"{self._num_dropped} of {self._num_sent} updates of the metrics were dropped"
            troubles.append(f"{self._what} took too long: {missing}")
        return troubles

    def _write(self) -> None:
        while self._rest and self._is_open:
            try:
                written = os.write(self._input, self._rest)
            except BlockingIOError:
                return
            except OSError:  # the process has ended
                self._close_input()
                return
            self._rest = self._rest[written:]

    def _close_input(self) -> None:
        self._rest = memoryview(b"")
        if self._is_open:
            self._is_open = False
            assert self._process.stdin is not None
            self._process.stdin.close()


# --- OpenMetrics ---------------------------------------------------------------------------------


def listen(port: int, option: str) -> socket.socket:
    """Return a socket that listens on ``port`` of the loopback address; 0 picks a free port.

    Raises:
        UsageError: The port cannot be used. The error message names ``option``.
    """
    listener = socket.socket()
    try:
        # Allow the port to be used again as soon as the previous job has ended.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        listener.listen(_WAITING_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"{option}: cannot listen on port {port} of {_HOST}: {error.strerror}. Choose another "
            "port, or 0 for a free port"
        ) from None
    return listener


class EndpointRecorder:
    """Counts the steps of one attempt, and sends the counts with each view to the endpoint process.

    All counts are cumulative, so a busy endpoint may miss a document without harm. The JSON text of
    an instance's counts is updated when steps arrive, so that a view of thousands of instances is
    sent quickly. If a document has been sent only in part, the function ``continue_sending`` sends
    the rest.
    """

    def __init__(
        self,
        send: Callable[[str], object],
        restart_count: int,
        continue_sending: Callable[[], object] = lambda: None,
    ) -> None:
        self._send, self._continue_sending = send, continue_sending
        self._restart_count = restart_count
        self._steps: dict[int, _StepCounts] = {}  # keyed by the instance
        send(json.dumps({"restarts": restart_count}))

    def steps(self, records: Sequence[StepRecord], /) -> None:
        """Add new training steps to the step counts and to the histograms of step durations."""
        for record in records:
            self._steps.setdefault(record.instance, _StepCounts()).add(record)
        for instance in {record.instance for record in records}:
            self._steps[instance].update_text()
        self._continue_sending()

    def view(self, view: JobView, at: float, /) -> None:
        """Send a view of the job, with the counts of all training steps so far."""
        # Joining cached JSON texts is quicker than encoding all values again.
        steps = ", ".join([f'"{index}": {each.text}' for index, each in self._steps.items()])
        restarts, text = self._restart_count, view.json_text()
        self._send(f'{{"restarts": {restarts}, "view": {text}, "steps": {{{steps}}}}}')


class _StepCounts:
    """The number of training steps of one instance, and histograms of the step durations.

    A histogram consists of the number of steps in each bucket and the sum of all durations.
    """

    def __init__(self) -> None:
        self.text = ""
        self._count = 0
        self._histograms: dict[str, Any] = {
            name: {"counts": [0] * (len(BOUNDS) + 1), "sum": 0.0}
            for name in ("seconds", "own_seconds")
        }

    def add(self, record: StepRecord) -> None:
        self._count += record.every
        if record.seconds > 0:  # a program's first step is not timed
            for name, histogram in self._histograms.items():
                seconds = getattr(record, name)
                histogram["counts"][bisect_left(BOUNDS, seconds)] += record.every
                histogram["sum"] += seconds * record.every

    def update_text(self) -> None:
        """Set ``text`` to the current step count and histograms as JSON."""
        self.text = json.dumps({"count": self._count, **self._histograms})


# --- TensorBoard and Weights & Biases ------------------------------------------------------------


class ChartRecorder:
    """Sends metrics for charts after new training steps of an attempt, at most once per second.

    Each metric has a name such as ``loss/instance-0``, so that one section of charts compares all
    instances. The x axis of all charts is the training step.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], object]) -> None:
        self._send = send
        self._last_step: int | None = None
        self._last_at = float("-inf")
        send({"begins": True})

    def steps(self, records: Sequence[StepRecord], /) -> None:
        """Ignore single training steps, because views contain the medians of the last steps."""

    def view(self, view: JobView, at: float, /) -> None:
        """Send the metrics of a job view, unless metrics were sent less than a second ago.

        After the end of the job, the metrics of the last view are always sent.
        """
        step = training_step(view)
        if step is None or step == self._last_step:
            return
        has_ended = all(state.phase == "ended" for state in view.instances)
        if at - self._last_at < _APART_SECONDS and not has_ended:
            return
        self._last_step, self._last_at = step, at
        self._send({"step": step, "values": chart_values(view)})


def training_step(view: JobView) -> int | None:
    """Return the last training step that all instances have completed; None before step 1."""
    steps = [state.step for state in view.instances if state.step is not None]
    return min(steps, default=0) or None


def chart_values(view: JobView) -> dict[str, float]:
    """Return the known metrics of a job view, keyed by the names of the metrics."""
    states = view.instances
    values: dict[str, float] = {}
    if view.samples_per_second:
        values["samples_per_second/total"] = view.samples_per_second
    losses = [state.loss for state in states if state.loss is not None]
    if losses:
        values["loss/mean"] = sum(losses) / len(losses)
    for name, value_of in _INSTANCE_VALUES.items():
        numbers = {
            state.index: number for state in states if (number := value_of(state)) is not None
        }
        values.update(_by_instance(name, numbers, len(states)))
    known = [state.shares for state in states if any(state.shares)]
    for position, activity in enumerate(ACTIVITIES if known else ()):
        total = sum([shares[position] for shares in known])
        values[f"share_of_time/{activity}"] = total / len(known)
    return values


def _by_instance(name: str, numbers: Mapping[int, float], num_instances: int) -> dict[str, float]:
    if num_instances <= _MOST_INSTANCES:
        return {f"{name}/instance-{index}": number for index, number in numbers.items()}
    if not numbers:
        return {}
    every = list(numbers.values())
    return {
        f"{name}/least": min(every),
        f"{name}/median": median(every),
        f"{name}/greatest": max(every),
    }
