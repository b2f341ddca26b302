"""The cost of a restart: seconds from a failure to the next training step, and repeated steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from poprun_py.display.formatting import duration_text
from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.running.watch.phases import RESTART_PARTS, Phases


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartCost:
    """The cost of one restart that led to a training step; times in seconds.

    Attributes:
        ending: From the failure until all processes of the failed attempt had ended.
        pause: From then until the next attempt began.
        starting: From then until the program of the slowest instance was started.
        imports: From then until the program began to count its time, usually by ``init()``.
        compiling: The time of compiling models, or of loading them from the cache.
        state: The time of loading the state of the training.
        first_step: The rest of the time until the end of the first training step.
        num_repeated_steps: The number of finished training steps that are computed again.
    """

    ending: float
    pause: float
    starting: float
    imports: float
    compiling: float
    state: float
    first_step: float
    num_repeated_steps: int

    @property
    def seconds(self) -> float:
        """The time from the failure to the end of the next training step."""
        return sum(self._parts().values())

    def _parts(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in RESTART_PARTS}

    def to_json(self) -> dict[str, Any]:
        """Return the cost as JSON values."""
        parts = {name: round(seconds, 3) for name, seconds in self._parts().items()}
        repeated = self.num_repeated_steps
        return {"seconds": round(self.seconds, 3), **parts, "num_repeated_steps": repeated}

    @property
    def text(self) -> str:
        """The cost in words, as the end of a sentence about the restart."""
        parts = [
            f"{RESTART_PARTS[name]} {duration_text(round(seconds, 2))}"
            for name, seconds in self._parts().items()
            if round(seconds, 2)
        ]
        seconds = duration_text(round(self.seconds, 2))
        return (
            f"took {seconds} from the failure to the next training step ({', '.join(parts)}); "
            f"finished training steps that were computed again: {self.num_repeated_steps}"
        )


def restart_cost(
    failed: LaunchResult, pause: float, result: LaunchResult, reached: int
) -> RestartCost | None:
    """Return the cost of the restart after the attempt ``failed``.

    Args:
        failed: The result of the attempt before the restart.
        pause: The seconds between the two attempts.
        result: The result of the attempt after the restart.
        reached: The last training step of all attempts before the restart.

    Returns:
        The cost; None if no training step of the attempt after the restart is known.
    """
    phases = [each.phases for each in (result.view.instances if result.view else ())]
    known = [each for each in phases if each is not None and each.imports is not None]
    resumed = max((each.progress.resumed for each in result.instances if each.progress), default=0)
    if not known or (result.last_step or 0) <= resumed:
        return None
    slowest = max(known, key=_until_first_step)
    before = dict(slowest.before_steps)
    return RestartCost(
        ending=failed.ending_seconds,
        pause=pause,
        starting=slowest.launch,
        imports=slowest.imports or 0.0,
        compiling=before.pop("compiling", 0.0),
        state=before.pop("saving", 0.0),
        first_step=sum(before.values()),
        num_repeated_steps=max(0, reached - resumed),
    )


def _until_first_step(phases: Phases) -> float:
    return phases.launch + (phases.imports or 0.0) + sum(phases.before_steps.values())
