"""Functions of torch.distributed that ask whether a group is gloo's: they serve ours too.

Each is replaced by one that does the same for every other group.
Nothing here knows what a group does when it is asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["serve_our_groups"]


def serve_our_groups() -> None:
    """Let the functions of torch ask our groups as they ask gloo's."""
    theirs_barrier = distributed_c10d.monitored_barrier
    theirs_set_timeout = distributed_c10d._set_pg_timeout

    @functools.wraps(theirs_barrier)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        ours = _our_group(group)
        if ours is None:
            return theirs_barrier(group, timeout, wait_all_ranks)
        if isinstance(timeout, int | float):
            timeout = timedelta(seconds=timeout)
        return ours.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    @functools.wraps(theirs_set_timeout)
    def set_timeout(timeout: timedelta, group: Any = None) -> None:
        ours = _our_group(group)
        if ours is None:
            theirs_set_timeout(timeout, group)
        else:
            ours.set_timeout(timeout)

    _replace(theirs_barrier, monitored_barrier)
    _replace(theirs_set_timeout, set_timeout)


def _our_group(group: Any) -> Any:
    """Return the group that is meant if it is one of ours."""
    # Not before it is asked for: programs without a group of ours never need it.
    from popdist_py.torch_backend.process_group import PopdistProcessGroup

    group = dist.group.WORLD if group is None else group
    return group if isinstance(group, PopdistProcessGroup) else None


def _replace(theirs: Callable[..., Any], ours: Callable[..., Any]) -> None:
    for module in (dist, distributed_c10d):
        if getattr(module, theirs.__name__, None) is theirs:
            setattr(module, theirs.__name__, ours)
