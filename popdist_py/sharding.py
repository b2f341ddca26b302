"""Index arithmetic for the elements of a data set that an instance reads in each epoch.

The functions are pure functions of integers. The functions of this module do not use torch, the
environment or files. They divide a data set by the same rule as PopTorch's DataLoader
(``_SubDataset``) with automatic distributed partitioning.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.errors import counted


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
    if num_elements < 0 or step < 1 or not 0 <= process < num_processes:
        raise ValueError(
            f"cannot shard {counted(num_elements, 'element')} in steps of {step} for process "
            f"{process} of "
            f"{num_processes}: expected elements >= 0, step >= 1 and 0 <= process < processes"
        )
    if drop_last:
        length = step * (num_elements // (step * num_processes))
        # If the data set is smaller than one step of all processes, length is 0.
        leftovers = num_elements % length if length else num_elements
        return Shard(offset=process * length, length=length, leftovers=leftovers)
    shortest, num_longer = divmod(num_elements, num_processes)
    return Shard(
        offset=process * shortest + min(process, num_longer),
        length=shortest + (1 if process < num_longer else 0),
    )
