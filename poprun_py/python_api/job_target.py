"""The target of ``launch`` and ``start``: a function, a program, a configuration or a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poprun_py.errors import UsageError
from poprun_py.options.launch_config import LaunchConfig, changed_config, config_of
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name
from poprun_py.running.supervise.job import LaunchResult


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTarget:
    """A target that can be launched.

    Attributes:
        name: The name of the program or function.
        job: The configuration or plan to launch.
        read: A function that converts the job's LaunchResult to the value that ``launch`` returns,
            or raises the job's error.
    """

    name: str
    job: LaunchConfig | LaunchPlan
    read: Callable[[LaunchResult], Any]


def job_target(
    target: object,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    options: Mapping[str, object],
    folder: str | None,
) -> JobTarget:
    """Return the target for the arguments of ``launch`` or ``start``.

    Args:
        target: A function, a program as a list of words, a configuration, or a plan.
        args: The positional arguments of the function.
        kwargs: The keyword arguments of the function.
        options: The options of the launch, named like the fields of LaunchConfig.
        folder: The private folder of the job; None if ``target`` is not a function.

    Raises:
        UsageError: The target cannot be launched.
    """
    if callable(target):
        assert folder is not None
        return _function_target(target, args, kwargs, options, Path(folder) / "call")
    if args or kwargs:
        raise UsageError("args and kwargs are for a function; a program is a list of words")
    job = _config_or_plan(target, options)
    config = job.config if isinstance(job, LaunchPlan) else job
    if not config.program:
        raise UsageError("nothing to launch: expected a program or a function")
    return JobTarget(
        name=short_name(config.program), job=job, read=lambda result: result.raise_for_failure()
    )


def _config_or_plan(target: object, options: Mapping[str, object]) -> LaunchConfig | LaunchPlan:
    if isinstance(target, LaunchPlan):
        if options:
            raise UsageError(
                f"{next(iter(options))}: a plan cannot be changed; make a new one (poprun_py.plan)"
            )
        return target
    if isinstance(target, LaunchConfig):
        return changed_config(target, options) if options else target
    if isinstance(target, list | tuple):
        return config_of(target, options)
    shown = ascii(target)
    raise UsageError(
        f"{shown if len(shown) <= 60 else f'{shown[:57]}...'} cannot be launched: expected a "
        'function, a program as a list of words such as ["train.py", "--lr", 0.1], a '
        "LaunchConfig, or a LaunchPlan"
    )


def _function_target(
    function: Callable[..., object],
    args: object,
    kwargs: object,
    options: Mapping[str, object],
    folder: Path,
) -> JobTarget:
    from poprun_py.python_api.functions.packed_call import function_name, write_call
    from poprun_py.python_api.functions.results import read_results

    name = function_name(function)
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UsageError(
            f"args of type {type(args).__name__}: expected a tuple of the arguments of {name}, "
            "such as (3,)"
        )
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(
            f"kwargs of type {type(kwargs).__name__}: expected a mapping from names of arguments "
            f'of {name}, such as {{"lr": 0.1}}'
        )
    folder.mkdir(mode=0o700)
    job = config_of(write_call(folder, function, args, kwargs), options)
    return JobTarget(name=name, job=job, read=lambda result: read_results(folder, result))
