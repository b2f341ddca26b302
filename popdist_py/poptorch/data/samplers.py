"""In which order a data loader reads its data set: this process's share, and groups of batches.

Samplers and the small data set and collate function that go with them; no shared memory, no
processes. Which elements belong to which process is decided by ``popdist_py.sharding``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import torch

from popdist_py.poptorch.calls.custom_types import CarriesParsers, parser_of
from popdist_py.poptorch.data import drawn_orders
from popdist_py.sharding import Shard

__all__ = [
    "BatchDataset",
    "Concatenate",
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


class ShardSampler(torch.utils.data.Sampler[int]):
    """The indices of one process's share of a data set, shuffled or not.

    Args:
        order: every index of the data set in reading order (a range, or the user's own sampler,
            which must give the same order on every process).
        shard: the share of this process.
        seed: None to keep that order. Otherwise every process draws the same permutation of the
            whole data set from this seed, a new one each epoch, and takes its own window of it.

    Source of the rule: PopTorch's DataLoader (``_SubDataset``).
    """

    def __init__(self, order: Iterable[int], shard: Shard, seed: int | None) -> None:
        self._order = order
        self._shard = shard
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._epoch = 0
        self._number = next(_numbers)
        self.drawn: drawn_orders.DrawnOrder | None = None  # for a sampler of the program's own

    @property
    def sampler(self) -> Any:
        """The order that is shared out."""
        return self._order

    def __len__(self) -> int:
        return self._shard.length

    def __iter__(self) -> Iterator[int]:
        window = self._shard.window(self._epoch if self._generator else 0)
        self._epoch += 1
        order = list(self._order)
        if self.drawn is None and not isinstance(self._order, range):
            self.drawn = drawn_orders.DrawnOrder.of(self._number, self._order, order)
            drawn_orders.note(self.drawn)
        if self._generator is None:
            return iter(order[window.start : window.stop])
        permutation = torch.randperm(len(order), generator=self._generator)
        return (order[i] for i in permutation[window.start : window.stop].tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return what the next pass depends on: its number and the state of the generator."""
        return {
            "epoch": self._epoch,
            "generator": None if self._generator is None else self._generator.get_state(),
            "order": sampler_state(self._order),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what state_dict() returned; the next pass is the one that followed then."""
        self._epoch = state_dict["epoch"]
        if self._generator is not None and state_dict["generator"] is not None:
            self._generator.set_state(state_dict["generator"])
        load_sampler_state(self._order, state_dict["order"])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._generator is not None:
            state["_generator"] = self._generator.get_state()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._generator is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["_generator"])


class GroupedBatchSampler:
    """Yields ``size`` consecutive batches of a batch sampler as one list of lists of indices.

    Args:
        batches: the user's batch sampler; its length may be unknown.
        size: batches in a group: device iterations x replicas x gradient accumulation.
        drop_last: whether a last group with fewer batches is left out.
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
        """Number of batches before they are grouped.

        Raises:
            TypeError: the user's batch sampler does not know.
        """
        length = sampler_length(self._batches)
        if length is None:
            raise TypeError(f"the batch sampler {type(self._batches).__name__} has no length")
        return length

    def __len__(self) -> int:
        length = self.num_batches
        return length // self._size if self._drop_last else -(-length // self._size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the user's batch sampler."""
        return {"batches": sampler_state(self._batches)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what state_dict() returned."""
        load_sampler_state(self._batches, state_dict["batches"])


def sampler_state(sampler: Any) -> dict[str, Any]:
    """Return what the next pass over ``sampler`` depends on.

    That is its ``state_dict()``. Of a sampler without one, torch's attributes are read: its
    ``generator``, its ``epoch`` (as of DistributedSampler), and the ``sampler`` that it reads.
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
    """Give a sampler what :func:`sampler_state` returned, as far as it is of the same kind.

    A loader that was made for another number of instances may have other samplers.
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
    """Return what ``set_epoch()`` told a sampler, and those that it reads through."""
    return tuple(each.epoch for each in _with_epoch(sampler))


def set_sampler_epochs(sampler: Any, epochs: Sequence[int]) -> None:
    """Tell a sampler, and those that it reads through, what :func:`sampler_epochs` returned."""
    for each, epoch in zip(_with_epoch(sampler), epochs, strict=True):
        each.set_epoch(epoch)


def _with_epoch(sampler: Any) -> Iterator[Any]:
    """Yield the samplers in a chain that are told of epochs, as torch's DistributedSampler is."""
    while sampler is not None:
        if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
            yield sampler
        sampler = getattr(sampler, "sampler", None)


def drawn_order(sampler: Any) -> drawn_orders.DrawnOrder | None:
    """Return the order that the program's own sampler has drawn, if ``sampler`` wraps one."""
    while sampler is not None:
        if isinstance(sampler, ShardSampler):
            return sampler.drawn
        sampler = getattr(sampler, "sampler", None)
    return None


def num_elements_of(batch_sampler: Any) -> int:
    """Return how many elements the batches of a sampler with a ``batch_size`` have.

    Only the last one of torch's own may be known to be short; of others, all are taken as whole.
    """
    most = len(batch_sampler) * int(batch_sampler.batch_size)
    is_torchs = isinstance(batch_sampler, torch.utils.data.BatchSampler)
    return min(most, len(batch_sampler.sampler)) if is_torchs else most


def sampler_length(sampler: Any) -> int | None:
    """Return ``len(sampler)``, or None where the sampler does not know it."""
    try:
        return len(sampler)
    except (TypeError, NotImplementedError, AttributeError):
        return None


class BatchDataset(torch.utils.data.Dataset[Any]):
    """A data set whose element for a list of indices is their collated batch."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset = dataset
        self._collate_fn = collate_fn

    def __getitem__(self, indices: Sequence[int]) -> Any:
        """Return the batch of the elements with these indices."""
        return self._collate_fn([self.dataset[index] for index in indices])


class Concatenate(CarriesParsers):
    """Joins batches of one structure along dimension 0, tensor by tensor: a collate function."""

    def __call__(self, batches: Sequence[Any]) -> Any:
        """Return the batches as one.

        Raises:
            TypeError: they hold something else than tensors and what is made of them.
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
        "function must return tensors, lists, tuples or dicts of them, or a type with a parser "
        "(poptorch.registerCustomArgParser)"
    )


def _holds_tensors(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, dict, list, tuple)) or parser_of(item) is not None
