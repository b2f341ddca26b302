"""poprun-py, a launcher that starts the instances of a distributed job under MPI.

This package exports the names of the Python API. The module that defines a name is imported when
the name is first used, so that ``--help`` and the wrapper process of each instance start quickly.
"""

# TYPE_CHECKING is False at run time, and True for type checkers, as in typing. The wrapper process
# of each instance imports this package before it starts the user's program, and importing typing
# would delay the program.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from poprun_py.errors import JobFailedError, LaunchError, StartError, TimeLimitError, UsageError
    from poprun_py.launching.launch_planning import plan
    from poprun_py.options.launch_config import LaunchConfig
    from poprun_py.planning.launch_plan import LaunchPlan
    from poprun_py.python_api.handle import JobHandle
    from poprun_py.python_api.launch import launch, start
    from poprun_py.python_api.status import JobStatus
    from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult

__version__ = "0.2.0.dev0"

__all__ = [
    "InstanceResult",
    "JobFailedError",
    "JobHandle",
    "JobStatus",
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
    "start",
]

_MODULE_OF_NAME = {
    "JobFailedError": "errors",
    "JobHandle": "python_api.handle",
    "JobStatus": "python_api.status",
    "LaunchConfig": "options.launch_config",
    "LaunchError": "errors",
    "StartError": "errors",
    "TimeLimitError": "errors",
    "UsageError": "errors",
    "LaunchPlan": "planning.launch_plan",
    "InstanceResult": "running.supervise.launch_result",
    "LaunchResult": "running.supervise.launch_result",
    "launch": "python_api.launch",
    "plan": "launching.launch_planning",
    "start": "python_api.launch",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)


def _load_views() -> object:
    # display/public_values.py calls ``_load_views``.
    from poprun_py.python_api import value_views

    return value_views
