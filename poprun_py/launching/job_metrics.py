"""The destinations of a run's metrics, such as TensorBoard, for all attempts of the run.

If metrics cannot be written to a destination, the launch fails before a program starts.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poprun_py.errors import UsageError, missing_package_text
from poprun_py.options.option_types import (
    CSV,
    JSONL,
    TENSORBOARD,
    WANDB,
    MetricsDestination,
    read_destinations,
)
from poprun_py.options.written_files import require_new
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from poprun_py.running.metrics.metrics_feed import MetricsProcess
    from poprun_py.running.watch.records import Recorder

_WANDB_GROUP: Final = "WANDB_RUN_GROUP"
# The names of the folder and the files in the folder of the run.
_DEFAULT_NAMES: Final = {TENSORBOARD: "tensorboard", CSV: "metrics.csv", JSONL: "metrics.jsonl"}
# Environment variables that select the Weights & Biases run of the user's program. They are not
# passed on to the launcher's own Weights & Biases run.
_OF_ONE_RUN: Final = ("WANDB_RUN_ID", "WANDB_RESUME")


class JobMetrics:
    """The destinations of one run's metrics.

    Raises:
        UsageError: The metrics port is taken, the package wandb is not installed, or a folder or
            file for metrics cannot be written to, or the file exists.
    """

    def __init__(self, planned: LaunchPlan) -> None:
        config = planned.config
        self._environ = planned.environ
        self._run = {
            # The name of a program file need not be valid Unicode, but JSON must be.
            "program": short_name(config.program).encode(errors="replace").decode(),
            "num_instances": len(planned.instances),
        }
        self._note = ""
        # The Weights & Biases group for all Weights & Biases runs of this job.
        self._wandb_group = planned.environ.get(_WANDB_GROUP, "")
        self._processes: list[MetricsProcess] = []
        self._recorders: list[Callable[[int], Recorder]] = []
        self._listener: socket.socket | None = None
        self._destinations = read_destinations(config.metrics_to)
        for destination in self._destinations:
            option = config.origin("metrics_to").shown(str(destination))
            if destination.tool == WANDB:
                _require_wandb(option)
            elif destination.tool == TENSORBOARD and destination.where:
                _make_folder(destination.where, option)
            elif destination.where:
                _check_file(destination, option, self._destinations)
        if config.metrics_port is not None:
            if find_spec("prometheus_client") is None:
                missing = missing_package_text("prometheus_client")
                raise UsageError(f"{config.shown('metrics_port')}: {missing}")
            from poprun_py.running.metrics.metrics_feed import listen

            self._listener = listen(config.metrics_port, config.shown("metrics_port"))

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that set the Weights & Biases group of the programs' runs."""
        uses_wandb = any(each.tool == WANDB for each in self._destinations)
        return {_WANDB_GROUP: self._wandb_group} if uses_wandb else {}

    def start(
        self,
        run_id: str,
        labels: Mapping[str, Any],
        folder: Path | None,
        tell: Callable[[str], None],
    ) -> None:
        """Start the processes that write or serve metrics; report the address of served metrics.

        ``labels`` are the tags and the note of the run. ``folder`` is the folder of the run; None
        without --output-dir.

        Raises:
            StartError: A process that writes or serves metrics cannot be started.
        """
        from poprun_py.running.metrics.metrics_feed import (
            ChartRecorder,
            EndpointRecorder,
            MetricsProcess,
        )

        tags = {"tags": labels["tags"]} if "tags" in labels else {}
        self._run = {"run_id": run_id, **self._run, **tags}
        self._note = labels.get("note", "")
        self._wandb_group = self._wandb_group or run_id
        if self._destinations:
            sinks = MetricsProcess(
                "popdist_py.metrics.run_feed",
                f"the process that writes to {' and '.join(map(str, self._destinations))}",
                {"sinks": [self._sink(each, folder) for each in self._destinations]},
                environ={n: v for n, v in self._environ.items() if n not in _OF_ONE_RUN},
            )
            self._processes.append(sinks)
            self._recorders.append(lambda _: ChartRecorder(sinks.send))
        if self._listener is not None:
            descriptor = self._listener.fileno()
            endpoint = MetricsProcess(
                "poprun_py.running.metrics.endpoint",
                "the endpoint of --metrics-port",
                {**self._run, "began": time.time(), "descriptor": descriptor},
                environ=self._environ,
                pass_fds=(descriptor,),
            )
            self._processes.append(endpoint)
            self._recorders.append(
                lambda count: EndpointRecorder(endpoint.send, count, endpoint.continue_sending)
            )
            host, port = self._listener.getsockname()
            self._listener.close()  # the endpoint process has its own copy of the socket
            tell(f"metrics are served at http://{host}:{port}/metrics")

    def begin(self, restart_count: int) -> tuple[Recorder, ...]:
        """Return the recorders that collect the metrics of the next attempt."""
        return tuple(make_recorder(restart_count) for make_recorder in self._recorders)

    def finish(self, tell: Callable[[str], None]) -> list[str]:
        """Wait until all metrics are written, and return the problems. Report a long wait."""
        troubles = [trouble for each in self._processes for trouble in each.finish(tell)]
        self._processes = []
        return troubles

    def close(self) -> None:
        """End the processes that write or serve metrics, if they are still running."""
        if self._listener is not None:
            self._listener.close()
        for each in self._processes:
            each.close()

    def _sink(self, destination: MetricsDestination, folder: Path | None) -> dict[str, Any]:
        """Return the settings of a metrics destination for the process that writes to it."""
        sink: dict[str, Any] = {"name": str(destination)}
        if destination.tool in _DEFAULT_NAMES:
            default = (folder or Path()) / _DEFAULT_NAMES[destination.tool]
            return {**sink, destination.tool: destination.where or str(default)}
        arguments = {
            **({"project": destination.where} if destination.where else {}),
            "name": self._run["run_id"],
            "group": self._wandb_group,
            "job_type": "launcher",
            "config": self._run,
            **({"notes": self._note} if self._note else {}),
        }
        return {**sink, WANDB: arguments}


def _require_wandb(option: str) -> None:
    spec = find_spec("wandb")
    # ``find_spec`` also finds a folder named wandb, such as the folder in which wandb stores its
    # runs. For a plain folder, ``spec.origin`` is None.
    if spec is None or spec.origin is None:
        raise UsageError(f"{option}: the package wandb is not installed; run pip install wandb")


def _make_folder(folder: str, option: str) -> None:
    path = Path(folder)
    expected = f"{option}: expected a folder that can be created and written to"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{expected} ({error.strerror})") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{expected} (Permission denied)")


def _check_file(
    destination: MetricsDestination, option: str, others: tuple[MetricsDestination, ...]
) -> None:
    """Refuse a file for metrics that exists, that cannot be written, or that has two formats."""
    path = Path(destination.where)
    folder = path.parent
    if not folder.is_dir() or path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(
            f"{option}: expected the path of a file in an existing folder with write permission"
        )
    if path.exists() and not path.is_file():
        raise UsageError(f"{option}: {path} is not a regular file; give the path of a regular file")
    files = [each.where for each in others if each.tool in (CSV, JSONL)]
    if files.count(destination.where) > 1:
        raise UsageError(
            f"{option}: two destinations of the metrics name this file; give each destination its "
            "own file"
        )
    require_new(path, option, "remove this file")
