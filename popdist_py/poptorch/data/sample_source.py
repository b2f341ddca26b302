"""The class ``Source``, which describes how a loader process loads a data set or a loader.

The functions in ``sample_source`` do not start processes or use shared memory. If a loader class
defines a method ``_loader_source(size)``, the function ``source_of`` returns the result of
``_loader_source``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

__all__ = ["LoaderArguments", "Source", "length_of", "loader_source", "source_of"]

# Python can send at most 256 file descriptors to a fork server, and every slot of shared memory
# needs a file descriptor.
_MAX_SLOTS: Final = 200


@dataclass(frozen=True, slots=True)
class LoaderArguments:
    """The arguments for a torch DataLoader that the loader process will make."""

    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The object that a loader process reads items from, and the properties of this object.

    Attributes:
        items: An iterable of items, a map-style data set, or :class:`LoaderArguments` (the
            arguments for a torch DataLoader).
        in_place: Whether the items are batches that can be collated directly in shared memory.
        ahead: The number of batches that the DataLoader's workers load ahead of time.
        drop_last: Whether the last batch is dropped if it is incomplete, when batches are
            assembled.
        length: A function that returns the number of items in an epoch, or raises a TypeError if
            the length of the data set is unknown.
        sampler: The training process's sampler, which determines the order of the items. The
            program may call the sampler's method ``set_epoch``.
        dataset: The training process's data set. The program may call the data set's method
            ``set_epoch``.
        why_empty: The text of the error message for a data set without a single item.
    """

    items: Any
    in_place: bool = False
    ahead: int = 0
    drop_last: bool = True
    length: Callable[[], int]
    sampler: Any = None
    dataset: Any = None
    why_empty: str = (
        "the data set is empty, or its items do not fill one batch. The data set must yield at "
        "least one item"
    )


def source_of(dataset: Any, size: int | None) -> Source:
    """Return a ``Source``, which describes how to load a data set, a loader or another iterable.

    Args:
        dataset: The data set, the loader or the other iterable.
        size: The number of elements in the batches to assemble from the items; None to send the
            items unchanged.
    """
    # The method ``_loader_source`` is used only if the class of ``dataset`` defines it. A wrapper
    # object may forward the attributes of a loader, but the loader process must iterate over the
    # wrapper, not over the loader.
    own = getattr(type(dataset), "_loader_source", None)
    if own is not None:
        source: Source = own(dataset, size)
        return source
    length = partial(length_of, dataset, size)
    if not isinstance(dataset, torch.utils.data.DataLoader):
        return Source(items=dataset, length=length, dataset=dataset)
    if type(dataset).__iter__ is not torch.utils.data.DataLoader.__iter__:
        return Source(items=dataset, drop_last=dataset.drop_last, length=length, dataset=dataset)
    return loader_source(dataset, size, drop_last=dataset.drop_last, length=length)


def loader_source(
    loader: torch.utils.data.DataLoader[Any],
    size: int | None,
    *,
    drop_last: bool,
    length: Callable[[], int],
) -> Source:
    """Return a ``Source``, which describes how to load the batches of a torch DataLoader.

    The loader process makes a torch DataLoader with the same arguments as the loader.

    Args:
        loader: The loader of the program, an instance of torch's DataLoader class.
        size: The number of elements in the batches to assemble; None to send the loader's batches
            unchanged.
        drop_last: Whether the last batch is dropped if it is incomplete, when batches are
            assembled.
        length: A function that returns the number of items in an epoch.
    """
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    in_place = (
        not isinstance(loader.dataset, torch.utils.data.IterableDataset)
        and loader.batch_sampler is not None
        # A function ``worker_init_fn`` may read the worker's data set, and expects the user's own
        # data set without a wrapper.
        and loader.worker_init_fn is None
        and size in (None, loader.batch_size)
        and ahead < _MAX_SLOTS
    )
    return Source(
        items=LoaderArguments(_arguments(loader)),
        in_place=in_place,
        ahead=ahead if in_place else 0,
        drop_last=drop_last,
        length=length,
        sampler=loader.sampler if loader.batch_sampler is None else loader.batch_sampler,
        dataset=loader.dataset,
    )


def length_of(dataset: Any, size: int | None) -> int:
    """Return the number of items in an epoch, after rebatching to batches of ``size`` elements.

    Raises:
        TypeError: The length of the data set is unknown.
    """
    length = len(dataset)
    if size is None:
        return length
    return length * (getattr(dataset, "batch_size", 1) or 1) // size


def _arguments(loader: torch.utils.data.DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments of a plain torch DataLoader that loads the batches of ``loader``."""
    names = [
        "dataset",
        "num_workers",
        "collate_fn",
        "timeout",
        "worker_init_fn",
        "generator",
        "persistent_workers",
    ]
    # The attribute ``in_order`` of a DataLoader exists since torch 2.6.
    if hasattr(loader, "in_order"):
        names += ["in_order"]
    if loader.num_workers > 0:
        names += ["prefetch_factor", "multiprocessing_context"]
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        names += ["batch_size", "drop_last"]
    elif loader.batch_sampler is not None:
        names += ["batch_sampler"]
    else:
        names += ["batch_size", "sampler"]
    return {name: getattr(loader, name) for name in names}
