"""Index arithmetic: which elements of a data set an instance reads, epoch by epoch.

Pure functions of whole numbers: torch, the environment and files may not come in here.
Source of the rule: PopTorch's DataLoader (``_SubDataset``) with automatic distributed partitioning.
"""

from __future__ import annotations

from dataclasses import dataclass

from popdist_py.errors import counted

__all__ = ["Shard", "shard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A contiguous window of a data set: elements ``offset`` to ``offset + length - 1``.

    ``leftovers`` is the number of elements that no process reads in one pass. Shuffled epochs
    alternate between windows at ``offset`` and at ``offset + leftovers``, so that they are read.
    """

    offset: int
    length: int
    leftovers: int = 0

    def window(self, epoch: int) -> range:
        """Return the indices for shuffled pass number ``epoch`` (0, 1, ...)."""
        start = self.offset + (self.leftovers if epoch % 2 else 0)
        return range(start, start + self.length)


def shard(
    num_elements: int, *, num_processes: int, process: int, step: int, drop_last: bool
) -> Shard:
    """Return the share of ``process`` in a data set of ``num_elements``.

    Args:
        num_elements: size N of the whole data set.
        num_processes: number of instances P that read it.
        process: index of this instance, 0 to P - 1.
        step: samples that one call of the model takes from one instance.
        drop_last: whether incomplete steps are dropped. If so, every process gets
            n = step * (N // (step * P)) elements and N % n are left over (all of N when n is 0);
            else N // P, and one more for the first N % P processes.

    Raises:
        ValueError: an argument is out of range.
    """
    if num_elements < 0 or step < 1 or not 0 <= process < num_processes:
        raise ValueError(
            f"cannot shard {counted(num_elements, 'element')} in steps of {step} for process "
            f"{process} of "
            f"{num_processes}: expected elements >= 0, step >= 1 and 0 <= process < processes"
        )
    if drop_last:
        length = step * (num_elements // (step * num_processes))
        # With fewer elements than one step of all processes, length is 0: no division by it.
        leftovers = num_elements % length if length else num_elements
        return Shard(offset=process * length, length=length, leftovers=leftovers)
    shortest, num_longer = divmod(num_elements, num_processes)
    return Shard(
        offset=process * shortest + min(process, num_longer),
        length=shortest + (1 if process < num_longer else 0),
    )
