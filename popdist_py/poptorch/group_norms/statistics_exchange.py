"""The class GroupExchange, which gathers numbers from all replicas of a group.

A group consists of n replicas with consecutive global indices, on one or several instances. Each
replica receives the numbers of all replicas of its group, in the order of the replicas. Each
replica sums the received numbers itself. Therefore the bits of a sum do not depend on how the
replicas are distributed over instances.
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
from popdist_py.poptorch.group_norms.replica_scheduler import meet

__all__ = ["KERNELS", "GroupExchange", "Question"]


@dataclass(frozen=True, slots=True)
class Question:
    """The message that one replica sends to the other replicas of its group.

    Attributes:
        name: The name of the replica's computation, to check that all replicas compute the same
            batch norm.
        row: The numbers that the replica sends, in the shape [1, numbers].
    """

    name: str
    row: torch.Tensor


class GroupExchange:
    """An exchange that returns the numbers of a whole group to each replica of this instance.

    Args:
        size: The number n of replicas in a group, which must divide the number of all replicas.
        replicas: The number of replicas of this instance, which is equal on all instances.
        communicator: The communicator that connects the instances.

    Attributes:
        size: The number of replicas in a group.
        handle: The number that identifies the GroupExchange in calls of the operator
            ``popdist::of_group``.
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
        """Do not exchange numbers with other instances inside the ``with`` block.

        Use ``alone()`` while ways to run the replicas are compared, because the comparison does not
        need the numbers of other instances. In place of another instance's numbers, each replica
        gets the numbers of this instance times two. The factor of two makes the contribution of
        other instances to a result differ from the instance's own contribution.
        """
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    def rows_of_groups(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """Return, for each replica, the numbers that all replicas of its group have sent.

        Args:
            rows: A tensor of the shape [replicas, numbers], with the numbers of all replicas of
                this instance, or of the one replica that is running.
            name: The name of the batch norm's computation, for error messages.

        Returns:
            A tensor of the shape [replicas, replicas of the group, numbers]. The returned tensor
            does not share memory with ``rows``.
        """
        if len(rows) == self._replicas:
            return self._of_all(rows, name)
        answer: torch.Tensor = meet(Question(name, rows))
        return answer

    def answers(self, questions: Sequence[Question]) -> Sequence[torch.Tensor]:
        """Return the numbers that each replica's group has sent, as one tensor for each replica.

        Args:
            questions: The messages that the replicas of this instance send.

        Raises:
            Error: The replicas compute batch norms with different names or sizes.
        """
        first = questions[0]
        for replica, question in enumerate(questions):
            if question.name != first.name or question.row.shape != first.row.shape:
                raise self._different(
                    f"0 computes the {first.name}, but local replica {replica} computes the "
                    f"{question.name}"
                )
        told = self._of_all(torch.cat([question.row for question in questions]), first.name)
        return [told[replica : replica + 1] for replica in range(len(questions))]

    def missed(self, ended: int, waiting: int, question: Question) -> Error:
        """Return the error for a replica that ended while another replica computes a batch norm."""
        return self._different(
            f"{waiting} computes the {question.name}, but local replica {ended} computes no "
            "further batch norm"
        )

    def _different(self, what: str) -> Error:
        return Error(
            f"Options.Training.distributedBatchNormReplicaGroupSize({self.size}): local replica "
            f"{what}. The forward pass must run the same batch norms in the same order on all "
            "replicas"
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
        """Return the numbers of all replicas of all instances, one row for each replica."""
        if self._is_alone:
            instances = self._communicator.num_instances
            before, after = first // self._replicas, instances - 1 - first // self._replicas
            return torch.cat([2 * rows] * before + [rows] + [2 * rows] * after)
        gathered = self._communicator.all_gather(rows.contiguous().numpy(), name)
        return torch.from_numpy(gathered).view(-1, rows.shape[1])


# A torch operator accepts only tensors, numbers and strings. Therefore a recorded graph of
# operations stores an exchange's handle instead of the GroupExchange object. The compiled model
# keeps the GroupExchange object alive.
_exchanges: Final[weakref.WeakValueDictionary[int, GroupExchange]] = weakref.WeakValueDictionary()
_handles: Final = count()


def _rows_of_groups(rows: torch.Tensor, handle: int, name: str) -> torch.Tensor:
    return _exchanges[handle].rows_of_groups(rows, name)


_LIBRARY: Final = torch.library.Library("popdist", "FRAGMENT")
# The tag ``nondeterministic_seeded`` keeps torch from removing or merging calls of the operator.
# Every call of the operator ``of_group`` must take place, because the operator's result also
# depends on other replicas.
_LIBRARY.define(
    "of_group(Tensor rows, int handle, str name) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.impl("of_group", _rows_of_groups, "CPU")
OF_GROUP: Final = torch.ops.popdist.of_group.default
# The Python function for each torch operator of the module ``statistics_exchange``. A recorded
# graph of operations calls the Python function directly, without torch's dispatcher.
KERNELS: Final[dict[Any, Callable[..., Any]]] = {OF_GROUP: _rows_of_groups}
