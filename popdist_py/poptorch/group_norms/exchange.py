"""What the replicas of a group tell one another: some numbers each, to all of the group.

A group is n replicas with consecutive global indices, on one instance or on several. Numbers travel
as they are and come in the order of the replicas, so that no sum depends on who runs where.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch

from popdist_py.collectives import Communicator
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.group_norms.turns import meet

__all__ = ["KERNELS", "GroupExchange", "Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """What a replica tells the others of its group when it is its turn.

    Attributes:
        name: what it computes.
        row: its numbers, [1, numbers].
    """

    name: str
    row: torch.Tensor


class GroupExchange:
    """Gives every local replica the numbers of its group.

    Args:
        size: replicas n of a group; divides the number of all replicas.
        replicas: number L of local replicas, the same on all instances.
        communicator: the other instances.

    Attributes:
        size: the same.
        handle: names this exchange in ``popdist::of_group``.
    """

    def __init__(self, size: int, replicas: int, communicator: Communicator) -> None:
        self.size = size
        self.handle = next(_handles)
        self._replicas = replicas
        self._communicator = communicator
        self._is_alone = False
        _exchanges[self.handle] = self

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Ask no other instance in the enclosed code, where numbers are only compared.

        Its replicas seem to say twice what local ones do, so that their part in a result shows.
        """
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def rows_of_groups(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Return what the members of the group of each replica told, itself included.

        Args:
            rows: [replicas, numbers]: of all local replicas, or of the one whose turn it is.
            name: what is computed, for messages.

        Returns:
            [replicas, members, numbers], in memory of its own.
        """
        if len(rows) == self._replicas:
            return self._of_all(rows, name)
        answer: torch.Tensor = meet(Question(name, rows))
        return answer

    def answers(self, questions: Sequence[Question]) -> Sequence[torch.Tensor]:
        """Return the answer to what each local replica told in its turn.

        Raises:
            Error: they compute different things.
        """
        first = questions[0]
        for replica, question in enumerate(questions):
            if question.name != first.name or question.row.shape != first.row.shape:
                raise self._different(
                    f"0 computes the {first.name}, replica {replica} the {question.name}"
                )
        told = self._of_all(torch.cat([question.row for question in questions]), first.name)
        return [told[replica : replica + 1] for replica in range(len(questions))]

    def missed(self, ended: int, waiting: int, question: Question) -> Error:
        """Return the error for a replica that ended where another one computes a batch norm."""
        return self._different(f"{waiting} computes the {question.name}, replica {ended} none")

    def _different(self, what: str) -> Error:
        return Error(
            f"Options.Training.distributedBatchNormReplicaGroupSize({self.size}): local replica "
            f"{what}; let the forward run the same batch norms in the same order on all replicas"
        )

    def _of_all(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        if self._replicas % self.size == 0:
            groups = rows.view(-1, self.size, rows.shape[1])
            return groups.repeat_interleave(self.size, 0)
        first = self._communicator.instance_index * self._replicas
        everyone = self._of_everyone(rows, first, name)
        begins = [
            replica // self.size * self.size for replica in range(first, first + self._replicas)
        ]
        return torch.stack([everyone[begin : begin + self.size] for begin in begins])

    def _of_everyone(self, rows: torch.Tensor, first: int, name: str) -> torch.Tensor:
        """Return the rows of all replicas of all instances."""
        if self._is_alone:
            instances = self._communicator.num_instances
            before, after = first // self._replicas, instances - 1 - first // self._replicas
            return torch.cat([2 * rows] * before + [rows] + [2 * rows] * after)
        gathered = self._communicator.all_gather(rows.contiguous().numpy(), name)
        return torch.from_numpy(gathered).view(-1, rows.shape[1])


# An operator takes numbers and tensors only. A captured graph holds the number; its model, the
# exchange.
_exchanges: Final[weakref.WeakValueDictionary[int, GroupExchange]] = weakref.WeakValueDictionary()
_handles: Final = count()


def _rows_of_groups(rows: torch.Tensor, handle: int, name: str) -> torch.Tensor:
    return _exchanges[handle].rows_of_groups(rows, name)


_LIBRARY: Final = torch.library.Library("popdist", "FRAGMENT")
# Like a random number, the result does not follow from the arguments, and every call counts.
_LIBRARY.define(
    "of_group(Tensor rows, int handle, str name) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.impl("of_group", _rows_of_groups, "CPU")
OF_GROUP: Final = torch.ops.popdist.of_group.default
# What a captured graph calls for the operator without torch's dispatcher in between.
KERNELS: Final[dict[Any, Callable[..., Any]]] = {OF_GROUP: _rows_of_groups}
