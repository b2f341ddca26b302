"""poprun-py: starts the instances of a distributed job under MPI.

The public list; each name is imported when it is first used, so that the wrapper and the help stay
fast.
"""

# As typing's, which the wrapper in front of every program would have to import.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from poprun_py.config.launch_config import LaunchConfig
    from poprun_py.errors import LaunchError, StartError, TimeLimitError, UsageError
    from poprun_py.launcher import launch, plan
    from poprun_py.planning.launch_plan import LaunchPlan
    from poprun_py.supervision.job import InstanceResult, LaunchResult

__version__ = "0.2.0.dev0"

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
    "LaunchConfig": "config.launch_config",
    "LaunchError": "errors",
    "StartError": "errors",
    "TimeLimitError": "errors",
    "UsageError": "errors",
    "LaunchPlan": "planning.launch_plan",
    "InstanceResult": "supervision.job",
    "LaunchResult": "supervision.job",
    "launch": "launcher",
    "plan": "launcher",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
