"""The back end ``popdist`` of torch.distributed: our collectives for any program that uses it.

``import popdist_py.torch_backend`` registers it; PyTorch does so by itself where this package is
installed, and so does every Python of a job. Importing it never fails.

process_group    the class that torch.distributed calls
arguments        what a call is given, checked before anything is sent
overloads        the second signatures of torch's methods
operations       the reductions, by torch's names
tensors          a tensor as the array that travels, and back
sparse_tensors   those of the ranks, added up
buckets          DistributedDataParallel's, moved to shared memory
work             what an asynchronous call returns, and the thread that does it
torch_functions  functions of torch.distributed that would refuse our groups
compilation      what keeps torch.compile out of our methods
substitution     the back end that a program gets for the one that it names
membership/      the part of this process in a group: joining, time-outs, errors, leaving
messages/        send and recv

Here lives the registration alone, which imports nothing but torch.distributed: every program that
imports torch comes by. Nothing here communicates.
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
# Before 2.7 its C++ drops the Python object of a call that it holds, and then waits for ever; with
# 2.7, 2.9 and 2.12 tests of the back end failed, for causes not known (docs/compatibility.md).
_OLDEST_TORCH = "2.13"
# environment.TORCH_BACKEND: importing it costs more than the registration.
_WANTED = "POPDIST_TORCH_BACKEND"


def register() -> None:
    """Make ``popdist`` a back end of torch.distributed for CPU tensors; again does nothing.

    A program gets the back end that POPDIST_TORCH_BACKEND asks for in place of the one that it
    names.
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME in dist.Backend.backend_list:
        return
    from popdist_py.torch_backend.torch_functions import offer

    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    offer(NAME)
    # From 2.15 on torch would note the calls of every group by a name in C++, which ours has not.
    recording: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recording.add(NAME)
    wanted = os.environ.get(_WANTED) or "auto"
    if wanted != "auto":
        from popdist_py.torch_backend.substitution import substitute

        substitute(wanted)


def _autoload() -> None:
    """Register where torch is imported (entry point ``torch.backends``).

    An error is a line on standard error: it must not keep the program from torch.
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
