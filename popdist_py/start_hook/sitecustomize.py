"""Prepares a Python process that starts with this folder on PYTHONPATH, such as an instance.

Programs can import emulated packages under the SDK's names, such as poptorch. Programs with
torch.distributed can use the back end popdist. The steps of torch's optimizers are counted. MPI's
sockets are limited to the job's network. The module multiprocessing makes its sockets in the job's
folder. Waiting OpenMP threads spin for about a millisecond before they sleep.

At the end, this module removes its folder from ``sys.path`` and runs the user's ``sitecustomize``.
The folder stays on PYTHONPATH, so this module also runs in every Python process that a program
starts.
"""

import os
import sys


def _add_names() -> None:
    """Let programs import emulated packages by the SDK's names, and CUDA builds of torchvision."""
    import popdist_sdk_finder  # type: ignore[import-not-found]

    if popdist_sdk_finder.start(default="no"):
        # If the library is installed, a .pth file already imports this hook for torchvision. A
        # checkout that is not installed has no such file.
        import popdist_torchvision_hook  # noqa: F401


def _add_back_end() -> None:
    """Register the back end popdist when the program imports torch.distributed."""
    import popdist_torch_distributed  # type: ignore[import-not-found]

    popdist_torch_distributed.start()


def _count_steps() -> None:
    """Count the steps of torch's optimizers when the program imports torch."""
    import popdist_torch_steps  # type: ignore[import-not-found]

    popdist_torch_steps.start()


def _keep_mpi() -> None:
    """Limit MPI's sockets to the network of the job."""
    import popdist_mpi_sockets  # type: ignore[import-not-found]

    popdist_mpi_sockets.start()


def _keep_sockets() -> None:
    """Make multiprocessing create its sockets in the folder of the job."""
    import popdist_multiprocessing_sockets  # type: ignore[import-not-found]

    popdist_multiprocessing_sockets.start()


def _let_threads_sleep() -> None:
    """Make waiting OpenMP threads sleep after about a millisecond."""
    import popdist_thread_waiting  # type: ignore[import-not-found]  # noqa: F401


def _step_aside() -> None:
    """Remove this folder from ``sys.path``, then run the user's ``sitecustomize`` if it exists."""
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
_count_steps()
_keep_mpi()
_keep_sockets()
_let_threads_sleep()
# A program that the launcher's wrapper forks from a prepared process runs this file once more. The
# user's ``sitecustomize`` has run in the prepared process.
if __name__ == "sitecustomize":
    _step_aside()
