"""The back end ``popdist`` of torch.distributed: our collectives for any program that uses it.

``import popdist_py.torch_backend`` registers it; PyTorch does so by itself where this package is
installed.

process_group    the class that torch.distributed calls
calls            one call of torch.distributed as a function over the communicator
tensors          a tensor as the array that travels, and back
work             what an asynchronous call returns, and the thread that does it
messages         send and recv: what is sent, and which receive gets it
message_work     one send or receive, which its caller waits for
mailbox          which message a receive gets
traffic          what moves headers and bytes to and from the other ranks
channels         one connection between two ranks
endpoint         where a rank is reached
store_meeting    how the processes of a group meet, over torch's store

Here lives the registration alone, which imports nothing but torch.distributed: every program that
imports torch comes by. Nothing here communicates.
May call: collectives, communicators, between_hosts, within_host, activities, environment, errors.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popdist_py.torch_backend.process_group import PopdistProcessGroup

__all__ = ["NAME", "register"]

NAME = "popdist"


def register() -> None:
    """Make ``popdist`` a back end of torch.distributed for CPU tensors; again does nothing."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _autoload() -> None:
    """Register when torch is imported (entry point ``torch.backends``)."""
    register()


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> PopdistProcessGroup:
    from popdist_py.torch_backend.process_group import PopdistProcessGroup

    return PopdistProcessGroup(store, rank, size, timeout)


register()
