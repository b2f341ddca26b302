"""The back end ``popdist`` of torch.distributed: the collectives of this library.

``import popdist_py.torch_backend`` registers the back end. If this package is installed, PyTorch
imports it automatically. In a job, every program that imports torch.distributed imports this
package too. If the registration fails, the import prints the error and does not raise it.

process_group    the class that torch.distributed calls
arguments        checks of a call's arguments, before data is sent
overloads        the second signature of the methods of a process group
operations       the reductions, by the names that torch gives them
tensors          tensors converted to NumPy arrays, and back
sparse_tensors   the sum of the ranks' sparse tensors
buckets          moves the buckets of DistributedDataParallel to shared memory
work             the work object that a call returns, and the thread for asynchronous calls
torch_functions  replacements for functions of torch.distributed that reject popdist groups
compilation      the exclusion of this back end's methods from torch.compile
substitution     replaces the back end that a program names
membership/      the membership of this process in a group, with its time-outs and errors
messages/        send and recv

This module contains only the registration. Every program that imports torch also imports this
module. To load fast, it imports no package except torch.distributed. No module of this folder opens
a connection, except in messages/.
May call: collectives, communicators, within_host, activities, environment, errors,
public_collectives, membership, messages.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popdist_py.torch_backend.process_group import PopdistProcessGroup

__all__ = ["NAME", "register"]

NAME = "popdist"
# The oldest version of torch for which this back end works. Before version 2.7, torch's C++ code
# releases the Python work object of a call too early, and then waits for ever. With torch 2.7, 2.9
# and 2.12, tests of this back end failed for unknown reasons, as docs/releasing.md says.
_OLDEST_TORCH = "2.13"
# The same variable name as popdist_py.environment.TORCH_BACKEND. The name is repeated here because
# importing popdist_py.environment would take longer than the whole registration.
_WANTED = "POPDIST_TORCH_BACKEND"


def register() -> None:
    """Make ``popdist`` a back end of torch.distributed for CPU tensors.

    A second call does nothing. If the environment variable POPDIST_TORCH_BACKEND names a back end,
    groups use it instead of the back end that the program names.
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    from popdist_py.torch_backend.torch_functions import offer

    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    offer(NAME)
    # From version 2.15 on, torch records the calls of each group under a C++ name. A back end that
    # is written in Python has no C++ name. torch does not record the calls of back ends that are in
    # the set _FR_SELF_RECORDING_BACKENDS.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)
    wanted = os.environ.get(_WANTED) or "auto"
    if wanted != "auto":
        from popdist_py.torch_backend.substitution import substitute

        substitute(wanted)


def _autoload() -> None:
    """Register the back end while torch is imported, through the entry point ``torch.backends``.

    Errors are written to standard error and not raised, so that ``import torch`` does not fail.
    """
    try:
        register()
    except Exception as error:
        sys.stderr.write(f"popdist_py.torch_backend: {error}\n")


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> PopdistProcessGroup:
    import torch

    if torch.__version__ < _OLDEST_TORCH:
        from popdist_py.errors import PopdistError

        raise PopdistError(
            f"the back end popdist needs torch {_OLDEST_TORCH} or newer, but torch "
            f"{torch.__version__} is installed. Install a newer torch, or use the back end gloo "
            "(poprun-py --torch-backend gloo)"
        )
    from popdist_py.torch_backend.process_group import PopdistProcessGroup

    return PopdistProcessGroup(store, rank, size, timeout)


_autoload()
