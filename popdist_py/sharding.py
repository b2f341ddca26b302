"""Index arithmetic for the elements of a data set that an instance reads in each epoch.

The functions are pure functions of integers. The functions of this module do not use torch, the
environment or files. The function ``global_share`` gives each instance its replicas' rows of every
global batch. The function ``shard`` divides a data set by the same rule as PopTorch's DataLoader
(``_SubDataset``) with automatic distributed partitioning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from popdist_py.errors import counted

__all__ = ["GlobalShare", "Shard", "global_share", "shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalShare:
    """The positions in the global reading order that one instance reads.

    All instances together read complete global batches from the positions 0 to ``whole - 1``. One
    global batch contains the elements for one call of the model on all instances. The positions 0
    to ``whole - 1`` form blocks of ``rows`` consecutive positions, and the instances read the
    blocks in turn. A replica therefore gets the same elements with any number of instances.

    Attributes:
        num_processes: The number of instances that share the reading order.
        process: The index of this instance.
        rows: The number of elements that this instance's replicas read for one micro-batch each.
        whole: The number of elements in complete global batches.
        tail: The positions behind the complete global batches that this instance reads. ``tail`` is
            empty if incomplete batches are dropped.
    """

    num_processes: int
    process: int
    rows: int
    whole: int
    tail: range

    @property
    def length(self) -> int:
        """The number of elements that this instance reads in an epoch."""
        return self.whole // self.num_processes + len(self.tail)

    def ranges(self) -> Iterator[range]:
        """Yield the positions that this instance reads, as ranges of consecutive positions."""
        stride = self.rows * self.num_processes
        for start in range(self.process * self.rows, self.whole, stride):
            yield range(start, start + self.rows)
        yield self.tail


def global_share(
    num_elements: int, *, num_processes: int, process: int, rows: int, step: int, drop_last: bool
) -> GlobalShare:
    """Return the positions in the global reading order that one of several instances reads.

    Args:
        num_elements: The size N of the whole data set.
        num_processes: The number P of instances that read the data set.
        process: The index of this instance, 0 to P - 1.
        rows: The number of elements that one instance's replicas read for one micro-batch each.
        step: The number of elements that one instance passes to one call of its model, a multiple
            of ``rows``.
        drop_last: Whether to drop the last r = N % (step * P) elements, which do not fill a global
            batch. If ``drop_last`` is false, each instance reads a contiguous part of the last r
            elements. The part has r // P elements, and one more on the first r % P instances.

    Raises:
        ValueError: An argument is out of range.
    """
    _check(num_elements, num_processes, process, step)
    if rows < 1 or step % rows:
        raise ValueError(
            f"step={step} must be a multiple of rows={rows}, and rows must be at least 1"
        )
    rest = num_elements % (step * num_processes)
    whole = num_elements - rest
    tail = range(0)
    if not drop_last:
        last = _even_part(rest, num_processes, process)
        tail = range(whole + last.start, whole + last.stop)
    return GlobalShare(
        num_processes=num_processes, process=process, rows=rows, whole=whole, tail=tail
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A contiguous part of a data set, with the elements ``offset`` to ``offset + length - 1``.

    Shuffled epochs with even numbers read from ``offset`` on, and shuffled epochs with odd numbers
    from ``offset + leftovers`` on. If ``leftovers`` is not 0, odd epochs therefore read elements at
    the end of the data set that even epochs do not read.
    """

    offset: int
    length: int
    leftovers: int = 0

    def window(self, epoch: int) -> range:
        """Return the indices that a shuffled epoch reads. Epochs are numbered from 0."""
        start = self.offset + (self.leftovers if epoch % 2 else 0)
        return range(start, start + self.length)


def shard(
    num_elements: int, *, num_processes: int, process: int, step: int, drop_last: bool
) -> Shard:
    """Return the part of a data set that one of several processes reads.

    Args:
        num_elements: The size N of the whole data set.
        num_processes: The number P of instances that read the data set.
        process: The index of this instance, 0 to P - 1.
        step: The number of elements that one instance passes to one call of its model.
        drop_last: Whether incomplete steps are dropped. If ``drop_last`` is true, every process
            gets n = step * (N // (step * P)) elements, and ``leftovers`` is N % n, or N if n is 0.
            If ``drop_last`` is false, every process gets N // P elements, and each of the first N %
            P processes gets one more.

    Raises:
        ValueError: An argument is out of range.
    """
    _check(num_elements, num_processes, process, step)
    if drop_last:
        length = step * (num_elements // (step * num_processes))
        # If the data set is smaller than one step of all processes, length is 0.
        leftovers = num_elements % length if length else num_elements
        return Shard(offset=process * length, length=length, leftovers=leftovers)
    part = _even_part(num_elements, num_processes, process)
    return Shard(offset=part.start, length=len(part))


def _check(num_elements: int, num_processes: int, process: int, step: int) -> None:
    if num_elements < 0 or step < 1 or not 0 <= process < num_processes:
        raise ValueError(
            f"cannot shard {counted(num_elements, 'element')} in steps of {step} for process "
            f"{process} of {num_processes}: expected num_elements >= 0, step >= 1 and "
            "0 <= process < num_processes"
        )


def _even_part(num_elements: int, num_processes: int, process: int) -> range:
    """Return one of ``num_processes`` contiguous parts, whose lengths differ by at most 1."""
    shortest, num_longer = divmod(num_elements, num_processes)
    start = process * shortest + min(process, num_longer)
    return range(start, start + shortest + (1 if process < num_longer else 0))
