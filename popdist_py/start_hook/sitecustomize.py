"""Runs when Python starts with this folder on PYTHONPATH: in a job, and before the SDK's programs.

Programs of the SDK find its names, and programs of torch.distributed find the back end popdist.
MPI's sockets are kept to the job's network, and multiprocessing's sockets to the job's folder.
Waiting OpenMP threads spin for about a millisecond before they sleep.

The folder leaves ``sys.path`` again, and the user's own ``sitecustomize`` is run. It stays on
PYTHONPATH, so that the Pythons that a program starts find the names as well.
"""

import os
import sys


def _add_names() -> None:
    """Let this Python find the names, and import torchvision before them."""
    import popdist_sdk_finder  # type: ignore[import-not-found]

    if popdist_sdk_finder.start(default="no"):
        # Every install has it in a .pth file, a checkout on PYTHONPATH has not.
        import popdist_torchvision_hook  # noqa: F401


def _add_back_end() -> None:
    """Let torch.distributed have the back end popdist."""
    import popdist_torch_finder  # type: ignore[import-not-found]

    popdist_torch_finder.start()


def _keep_mpi() -> None:
    """Keep MPI's sockets to the network of the job."""
    import popdist_mpi_finder  # type: ignore[import-not-found]

    popdist_mpi_finder.start()


def _keep_sockets() -> None:
    """Keep multiprocessing's sockets in the folder of the job."""
    import popdist_sockets_finder  # type: ignore[import-not-found]

    popdist_sockets_finder.start()


def _let_threads_sleep() -> None:
    """Make waiting OpenMP threads sleep after about a millisecond."""
    import popdist_thread_waiting  # type: ignore[import-not-found]  # noqa: F401


def _step_aside() -> None:
    """Take this folder off ``sys.path``, then run the user's ``sitecustomize`` if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if "sitecustomize" not in sys.modules and ours is not None:
            sys.modules["sitecustomize"] = ours


_add_names()
_add_back_end()
_keep_mpi()
_keep_sockets()
_let_threads_sleep()
_step_aside()
