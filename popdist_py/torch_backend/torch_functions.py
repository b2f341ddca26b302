"""Replacements for two functions of torch.distributed that support only some back ends.

torch's ``monitored_barrier`` rejects every group that does not use gloo. torch's
``_set_pg_timeout`` does not change the time-out of a popdist group. The function ``offer`` replaces
both functions in torch. For a popdist group, a replacement calls a method of the group. For other
groups, a replacement calls torch's original function.

Every program that imports torch also imports this module. To load fast, this module imports no
package except torch.distributed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["offer"]


def offer(backend: str) -> None:
    """Make ``monitored_barrier`` and ``_set_pg_timeout`` support groups of ``backend``.

    A second call does nothing.
    """
    module = dist.distributed_c10d
    if module.monitored_barrier.__module__ != __name__:
        barrier = _also(backend, module.monitored_barrier, _monitored_barrier)
        dist.monitored_barrier = module.monitored_barrier = barrier
        module._set_pg_timeout = _also(backend, module._set_pg_timeout, _set_pg_timeout)


def _also(
    backend: str, original: Callable[..., None], own: Callable[..., None]
) -> Callable[..., None]:
    """Return a function that calls ``own`` for groups of ``backend``, otherwise ``original``."""
    position = list(inspect.signature(original).parameters).index("group")

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> None:
        group = args[position] if len(args) > position else kwargs.get("group")
        is_ours = dist.get_rank(group) >= 0 and dist.get_backend(group) == backend
        (own if is_ours else original)(*args, **kwargs)

    function.__module__ = __name__
    return function


def _monitored_barrier(
    group: Any = None,
    timeout: Any = None,
    wait_all_ranks: bool = False,
) -> None:
    own: Any = group or dist.group.WORLD
    own.monitored_barrier(timeout, wait_all_ranks)


def _set_pg_timeout(timeout: Any, group: Any = None) -> None:
    own: Any = group or dist.group.WORLD
    own.set_timeout(timeout)
