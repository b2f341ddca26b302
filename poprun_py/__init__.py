"""poprun-py: starts the instances of a distributed job under MPI.

The public list; each name is imported when it is first used, so that the wrapper and the help stay
fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poprun_py.config import LaunchConfig
    from poprun_py.errors import LaunchError, StartError, TimeLimitError, UsageError
    from poprun_py.launch_plan import LaunchPlan
    from poprun_py.launcher import launch, plan
    from poprun_py.supervisor import InstanceResult, LaunchResult

__version__ = "0.2.0"

__all__ = [
    "InstanceResult",
    "LaunchConfig",
    "LaunchError",
    "LaunchPlan",
    "LaunchResult",
    "StartError",
    "TimeLimitError",
    "UsageError",
    "__version__",
    "launch",
    "plan",
]

_HOMES = {
    "LaunchConfig": "config",
    "LaunchError": "errors",
    "StartError": "errors",
    "TimeLimitError": "errors",
    "UsageError": "errors",
    "LaunchPlan": "launch_plan",
    "InstanceResult": "supervisor",
    "LaunchResult": "supervisor",
    "launch": "launcher",
    "plan": "launcher",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
