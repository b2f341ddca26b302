"""What a launcher's process is told, and what it says: the messages of the channel.

From the launcher come, each with its value: ``waiting`` (for whom, empty when no more),
``attempt`` (an Attempt that begins), ``log``, ``warn`` and ``binding`` (a line, for who asked to be
told), and at last ``result`` (a LaunchResult) or ``error`` (a LaunchError). Nothing here acts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.launch_plan import LaunchPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What to launch.

    Attributes:
        job: a configuration, which is planned first, or a plan.
        environ: to plan in; None for that of the process.
        folder: of the job, removed by whoever is left last; None for a job without one.
        keeps_output: whether what the instances write is kept in the folder.
        listeners: the kinds of lines that are sent instead of printed.
    """

    job: LaunchConfig | LaunchPlan
    # Holds secrets: never shown.
    environ: Mapping[str, str] | None = field(default=None, repr=False)
    folder: str | None = None
    keeps_output: bool = False
    listeners: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """An attempt at a job as it begins.

    Attributes:
        run_id: the name of the run.
        num_instances: of the job.
        folder: where what they write is kept; None for nowhere.
    """

    run_id: str
    num_instances: int
    folder: str | None
