"""The back end ``popdist`` of torch.distributed: the collectives of this library.

``import popdist_py.torch_backend`` registers the back end. PyTorch imports this package by itself
where it is installed, and so does every Python process of a job. The import never fails.

process_group    the class that torch.distributed calls
arguments        checks of a call's arguments, before data is sent
overloads        the second signature of each of torch's methods
operations       the reductions, by the names that torch gives them
tensors          tensors converted to NumPy arrays, and back
sparse_tensors   the sum of the ranks' sparse tensors
buckets          the buckets of DistributedDataParallel, moved to shared memory
work             the work object that a call returns, and the thread for asynchronous calls
torch_functions  replacements for functions of torch.distributed that reject popdist groups
compilation      the exclusion of this back end's methods from torch.compile
substitution     replaces the back end that a program names by another one
membership/      the membership of this process in a group, with its time-outs and errors
messages/        send and recv

This module contains only the registration. It imports torch.distributed and no other package,
because every program that imports torch runs it. No module of this folder opens a connection,
except in messages/.
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
# Before version 2.7, torch's C++ code drops the Python object of a call that it holds, and then
# waits for ever. With 2.7, 2.9 and 2.12, tests of this back end failed for unknown reasons
# (docs/compatibility.md).
_OLDEST_TORCH = "2.13"
# Equal to environment.TORCH_BACKEND, whose import would cost more than the registration.
_WANTED = "POPDIST_TORCH_BACKEND"


def register() -> None:
    """Make ``popdist`` a back end of torch.distributed for CPU tensors.

    A second call does nothing. If POPDIST_TORCH_BACKEND is set, a program gets that back end
    in place of the one that it names.
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    from popdist_py.torch_backend.torch_functions import offer

    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    offer(NAME)
    # From version 2.15 on, torch records the calls of a group by a C++ name, which a back end
    # written in Python lacks. torch does not record the back ends in this set.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)
    wanted = os.environ.get(_WANTED) or "auto"
    if wanted != "auto":
        from popdist_py.torch_backend.substitution import substitute

        substitute(wanted)


def _autoload() -> None:
    """Register the back end while torch is imported (entry point ``torch.backends``).

    An error is written to standard error, because it must not make ``import torch`` fail.
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
            f"the back end popdist needs torch {_OLDEST_TORCH} or newer, and this is torch "
            f"{torch.__version__}; name gloo (--torch-backend gloo), or install a newer torch"
        )
    from popdist_py.torch_backend.process_group import PopdistProcessGroup

    return PopdistProcessGroup(store, rank, size, timeout)


_autoload()
