"""What a job is to do: a program, a function, a configuration or a plan, as an order to launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poprun_py.errors import UsageError
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.options.python_keywords import changed_config, config_of
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name
from poprun_py.python_api.checks import require_arguments
from poprun_py.running.supervise.job import LaunchResult

# How the value of a job is made of its end, when that is known.
Reader = Callable[[LaunchResult], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a job is to do.

    Attributes:
        name: what people call it.
        job: what is launched.
        read: makes the job's value of how it ended, or raises why there is none.
    """

    name: str
    job: LaunchConfig | LaunchPlan
    read: Reader

    @classmethod
    def of(
        cls,
        target: object,
        args: Sequence[object],
        kwargs: Mapping[str, object] | None,
        options: Mapping[str, object],
        folder: Callable[[], Path],
    ) -> Work:
        """Return what a caller of ``launch`` or ``start`` asks for.

        Args:
            target: a function, a program as words, a configuration, or a plan.
            args: of the function.
            kwargs: of the function.
            options: fields of LaunchConfig.
            folder: makes the job's folder, where a function and its results travel.

        Raises:
            UsageError: it cannot be launched; nothing was started.
        """
        if callable(target):
            return _of_function(target, args, {} if kwargs is None else kwargs, options, folder())
        if args or kwargs:
            raise UsageError("args and kwargs are for a function; a program is a list of words")
        job = _job(target, options)
        config = job.config if isinstance(job, LaunchPlan) else job
        if not config.program:
            raise UsageError("nothing to launch: expected a program or a function")
        return cls(name=short_name(config.program), job=job, read=_well_ended)


def _job(target: object, options: Mapping[str, object]) -> LaunchConfig | LaunchPlan:
    """Return a plan or a configuration; options change the latter."""
    if isinstance(target, LaunchPlan):
        if options:
            raise UsageError(
                f"{next(iter(options))}: the plan has decided it; make a new one (poprun_py.plan)"
            )
        return target
    if isinstance(target, LaunchConfig):
        return changed_config(target, options, None) if options else target
    if isinstance(target, list | tuple):
        return config_of(target, options)
    raise UsageError(
        f"{_short(target)} cannot be launched: expected a function, a program as a list of words "
        'such as ["train.py", "--lr", 0.1], a LaunchConfig, or a LaunchPlan'
    )


def _of_function(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    options: Mapping[str, object],
    folder: Path,
) -> Work:
    from poprun_py.python_api.functions import results
    from poprun_py.python_api.functions.packed_call import Call

    name = getattr(function, "__name__", type(function).__name__)
    require_arguments(name, args, kwargs)
    place = folder / "call"
    place.mkdir(mode=0o700)
    call = Call.of(function, args, kwargs)
    job = config_of(call.program(place), options)
    return Work(name=name, job=job, read=lambda result: results.read(place, result))


def _well_ended(result: LaunchResult) -> LaunchResult:
    return result.raise_for_failure()


def _short(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
