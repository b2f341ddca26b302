"""Samplers for one process's share of a data set and for groups of batches.

The module ``samplers`` also contains the data set and the collate function for groups of batches.
The module ``popdist_py.sharding`` divides the elements of a data set among the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any

import torch

from popdist_py.poptorch.calls.custom_type_parsers import CarriesParsers, parser_of
from popdist_py.poptorch.data import sampler_order_check
from popdist_py.sharding import GlobalShare, Shard

__all__ = [
    "BatchDataset",
    "Concatenate",
    "GlobalOrderSampler",
    "GroupedBatchSampler",
    "ShardSampler",
    "drawn_order",
    "load_sampler_state",
    "num_elements_of",
    "sampler_epochs",
    "sampler_length",
    "sampler_state",
    "set_sampler_epochs",
]


_numbers = count()


class GlobalOrderSampler(torch.utils.data.Sampler[int]):
    """A sampler that yields one instance's rows of every global batch.

    All instances read global batches from one reading order. The elements of a global batch do not
    depend on the number of instances. The order of an epoch is a function of the seed and of the
    number of epochs that began before.

    Args:
        order: All indices of the data set in reading order, as a range, as torch's
            SequentialSampler or as the user's sampler. The user's sampler must yield the same order
            on every process.
        share: The positions in the reading order that this instance reads. With None, this instance
            reads the whole order, whose length may change between two epochs.
        seed: The seed for a random permutation in each epoch; None to keep the given order.
    """

    # The key of ``_random`` in saved states.
    _random_key = "seed"

    def __init__(self, order: Iterable[int], share: GlobalShare | None, seed: int | None) -> None:
        self._order: Any = order
        self._share = share
        # The value that determines the next permutation; None to keep the given order.
        self._random: Any = seed
        self._epoch = 0
        self._number = next(_numbers)
        # The length and hash of the first sequence of indices that the user's sampler yields.
        self.drawn: sampler_order_check.DrawnOrder | None = None

    @property
    def sampler(self) -> Any:
        """The range or the sampler whose indices are divided among the processes."""
        return self._order

    def __len__(self) -> int:
        return len(self._order) if self._share is None else self._share.length

    def __iter__(self) -> Iterator[int]:
        order = self._next_order()
        positions = self._positions(len(order))
        if self._random is not None:
            permutation = self._permutation(len(order)).tolist()
            positions = map(permutation.__getitem__, positions)
        self._epoch += 1
        return map(order.__getitem__, positions)

    def _next_order(self) -> Sequence[int]:
        """Return all indices in the reading order of the next epoch, before they are shuffled."""
        if isinstance(self._order, range):
            return self._order
        if type(self._order) is torch.utils.data.SequentialSampler:
            return range(len(self._order))
        order = list(self._order)
        if self.drawn is None:
            self.drawn = sampler_order_check.DrawnOrder.of(self._number, self._order, order)
            sampler_order_check.note(self.drawn)
        return order

    def _positions(self, length: int) -> Iterable[int]:
        """Return the positions that this instance reads in the next epoch."""
        if self._share is None:
            return range(length)
        return chain.from_iterable(self._share.ranges())

    def _permutation(self, length: int) -> torch.Tensor:
        """Return the random permutation of the next epoch, which is equal on all instances."""
        # Like torch's DistributedSampler, each epoch has a seed of its own. To continue in a later
        # epoch, a sampler therefore need not draw the orders of the earlier epochs.
        generator = torch.Generator().manual_seed((self._random + self._epoch) % 2**63)
        return torch.randperm(length, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that determines the order of the indices in the next epoch."""
        order = sampler_state(self._order)
        return {"epoch": self._epoch, self._random_key: self._random, "order": order}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of a sampler that ``state_dict()`` returned.

        A GlobalOrderSampler cannot use the random state of a ShardSampler, nor the other way round.
        After a state of the other class, a sampler keeps its own permutations.
        """
        self._epoch = state_dict["epoch"]
        if self._random is not None and state_dict.get(self._random_key) is not None:
            self._random = state_dict[self._random_key]
        load_sampler_state(self._order, state_dict["order"])


class ShardSampler(GlobalOrderSampler):
    """A sampler that yields the indices of one process's contiguous share of a data set.

    In each epoch, all processes draw the same new permutation of the whole data set, and each
    process reads a different part of the permutation. PopTorch's class ``_SubDataset`` divides a
    data set by the same rule as ``ShardSampler``.

    Args:
        order: All indices of the data set in reading order, as for GlobalOrderSampler.
        shard: The share of the data set that this process reads.
        seed: The seed of the first permutation; None to keep the given order.
    """

    _random_key = "generator"

    def __init__(self, order: Iterable[int], shard: Shard, seed: int | None) -> None:
        state = None if seed is None else torch.Generator().manual_seed(seed).get_state()
        super().__init__(order, None, None)
        self._shard, self._random = shard, state

    def __len__(self) -> int:
        return self._shard.length

    def _positions(self, length: int) -> range:
        window = self._shard.window(0 if self._random is None else self._epoch)
        return range(length)[window.start : window.stop]

    def _permutation(self, length: int) -> torch.Tensor:
        generator = torch.Generator()
        generator.set_state(self._random)
        permutation = torch.randperm(length, generator=generator)
        self._random = generator.get_state()
        return permutation


class GroupedBatchSampler:
    """A sampler that yields groups of consecutive batches, as lists of lists of indices.

    Args:
        batches: The user's batch sampler, whose length may be unknown.
        size: The number of batches in a group, which is the number of micro-batches in one call of
            the model.
        drop_last: Whether the last group is dropped if it has fewer than ``size`` batches.
    """

    def __init__(self, batches: Iterable[Sequence[int]], size: int, drop_last: bool) -> None:
        self._batches = batches
        self._size = size
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[list[Sequence[int]]]:
        batches = iter(self._batches)
        while group := list(islice(batches, self._size)):
            if len(group) == self._size or not self._drop_last:
                yield group

    @property
    def sampler(self) -> Any:
        """The user's batch sampler."""
        return self._batches

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch before the batches are grouped.

        Raises:
            TypeError: The length of the user's batch sampler is unknown.
        """
        length = sampler_length(self._batches)
        if length is None:
            raise TypeError(
                f"the batch sampler {type(self._batches).__name__} has no length: define its "
                "method __len__()"
            )
        return length

    def __len__(self) -> int:
        length = self.num_batches
        return length // self._size if self._drop_last else -(-length // self._size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's batch sampler."""
        return {"batches": sampler_state(self._batches)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of the user's batch sampler that ``state_dict()`` returned."""
        load_sampler_state(self._batches, state_dict["batches"])


def sampler_state(sampler: Any) -> dict[str, Any]:
    """Return the state of a sampler, which determines the indices that it yields next.

    If the sampler has a method ``state_dict()``, the function ``sampler_state`` calls this method.
    For a sampler without ``state_dict()``, the state contains the attributes ``generator``,
    ``epoch`` and ``sampler`` of torch's samplers. ``generator`` is the random generator, ``epoch``
    is the epoch number of a DistributedSampler, and ``sampler`` is an inner sampler.
    """
    if hasattr(sampler, "state_dict"):
        return {"state_dict": sampler.state_dict()}
    state: dict[str, Any] = {}
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        state["generator"] = generator.get_state()
    if isinstance(epoch := getattr(sampler, "epoch", None), int):
        state["epoch"] = epoch
    if (inner := getattr(sampler, "sampler", None)) is not None:
        state["sampler"] = sampler_state(inner)
    return state


def load_sampler_state(sampler: Any, state: Mapping[str, Any]) -> None:
    """Restore a state of a sampler that :func:`sampler_state` returned.

    A DataLoader for another number of instances may have samplers of other classes. Saved values of
    attributes that the sampler does not have are therefore ignored.
    """
    if "state_dict" in state:
        if hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(state["state_dict"])
        return
    generator = getattr(sampler, "generator", None)
    if "generator" in state and isinstance(generator, torch.Generator):
        generator.set_state(state["generator"])
    if "epoch" in state and isinstance(getattr(sampler, "epoch", None), int):
        sampler.epoch = state["epoch"]
    if "sampler" in state and (inner := getattr(sampler, "sampler", None)) is not None:
        load_sampler_state(inner, state["sampler"])


def sampler_epochs(sampler: Any) -> tuple[int, ...]:
    """Return the epochs that ``set_epoch()`` set on a sampler and on its inner samplers."""
    return tuple(each.epoch for each in _with_epoch(sampler))


def set_sampler_epochs(sampler: Any, epochs: Sequence[int]) -> None:
    """Call the method ``set_epoch()`` of a sampler and of its inner samplers.

    Args:
        sampler: The sampler.
        epochs: The epochs that :func:`sampler_epochs` returned.
    """
    for each, epoch in zip(_with_epoch(sampler), epochs, strict=True):
        each.set_epoch(epoch)


def _with_epoch(sampler: Any) -> Iterator[Any]:
    """Yield a sampler and its inner samplers, if they have ``set_epoch()`` and an ``epoch``."""
    while sampler is not None:
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
            yield sampler
        sampler = getattr(sampler, "sampler", None)


def drawn_order(sampler: Any) -> sampler_order_check.DrawnOrder | None:
    """Return a description of the first sequence of indices that the program's sampler drew.

    Returns:
        The length and hash of the sequence; None if ``sampler`` does not wrap a sampler of the
        program.
    """
    while sampler is not None:
        if isinstance(sampler, GlobalOrderSampler):
            return sampler.drawn
        sampler = getattr(sampler, "sampler", None)
    return None


def num_elements_of(batch_sampler: Any) -> int:
    """Return the number of elements in all batches of a batch sampler with a ``batch_size``.

    For torch's BatchSampler, the result includes the elements of an incomplete last batch. For
    other batch samplers, the result is computed as if all batches were complete.
    """
    most = len(batch_sampler) * int(batch_sampler.batch_size)
    is_torchs = isinstance(batch_sampler, torch.utils.data.BatchSampler)
    return min(most, len(batch_sampler.sampler)) if is_torchs else most


def sampler_length(sampler: Any) -> int | None:
    """Return ``len(sampler)``, or None if the length of the sampler is unknown."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError, AttributeError):
        return None


class BatchDataset(torch.utils.data.Dataset[Any]):
    """A data set that returns one collated batch for a list of indices."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn

    def __getitem__(self, indices: Sequence[int]) -> Any:
        """Return a collated batch of the elements with the given indices."""
        return self._collate_fn([self.dataset[index] for index in indices])


class Concatenate(CarriesParsers):
    """A collate function that concatenates the tensors of batches along dimension 0."""

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Return one batch that contains the elements of all ``batches``.

        Raises:
            TypeError: A batch contains a type that cannot be concatenated.
        """
        return _joined(batches)


def _joined(batches: Sequence[Any]) -> Any:
    first = batches[0]
    parser = parser_of(first)
    if isinstance(first, torch.Tensor):
        return torch.cat(list(batches), dim=0)
    if parser is not None:
        columns = zip(*map(parser.yieldTensors, batches), strict=True)
        return parser.reconstruct(first, map(_joined, columns))
    if isinstance(first, dict):
        return {key: _joined([batch[key] for batch in batches]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*map(_joined, zip(*batches, strict=True)))
    if isinstance(first, (tuple, list)) and all(map(_holds_tensors, first)):
        return type(first)(map(_joined, zip(*batches, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(item for batch in batches for item in batch)
    raise TypeError(
        f"cannot join batches of type {type(first).__name__} along dimension 0: the collate "
        "function must return tensors, lists, tuples or dicts of tensors, or a type with a parser "
        "(poptorch.registerCustomArgParser)"
    )


def _holds_tensors(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, dict, list, tuple)) or parser_of(item) is not None
