"""Small helper functions that programs import from ``horovod.common.util``.

These functions report the available features of Horovod, set environment variables for a block of
code, and split lists.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

__all__ = [
    "ccl_built",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

Item = TypeVar("Item")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001
    """Tell whether Horovod's API is available for a framework; True only for "torch"."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001
    """Tell whether GPUs are used; always False."""
    return False


def mpi_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Tell whether MPI can connect the instances; always True."""
    return True


def gloo_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Tell whether Gloo connects the instances; always False."""
    return False


def nccl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Tell whether NCCL is used; always False."""
    return False


def ddl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Tell whether IBM's DDL is used; always False."""
    return False


def ccl_built(verbose: bool = False) -> bool:  # noqa: ARG001
    """Tell whether oneCCL is used; always False."""
    return False


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables for a ``with`` block.

    An argument with the value None leaves its variable unchanged.
    """
    before = {name: os.environ.get(name) for name, value in kwargs.items() if value is not None}
    os.environ.update({name: value for name, value in kwargs.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Tell whether the number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: Sequence[Item], n: int) -> list[Sequence[Item]]:  # noqa: E741
    """Split a list into ``n`` parts.

    If the parts cannot have equal lengths, the first parts get one more item.
    """
    each, more = divmod(len(l), n)
    return [l[i * each + min(i, more) : (i + 1) * each + min(i + 1, more)] for i in range(n)]


def is_iterable(x: Any) -> bool:
    """Tell whether a value is iterable."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
