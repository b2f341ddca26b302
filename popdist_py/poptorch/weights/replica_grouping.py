"""Replica-grouped weights, which are parameters whose values differ between groups of replicas.

The host's tensor of a replica-grouped weight has one row for each group of replicas, along an
additional first dimension. In a forward pass, a replica uses the row of its own replica group as
the value of a replica-grouped weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from popdist_py.errors import counted
from popdist_py.poptorch.enums import CommGroupType, VariableRetrievalMode
from popdist_py.poptorch.errors import Error

__all__ = [
    "GroupableParameter",
    "Grouping",
    "grouping_of",
    "join_groups",
    "make_groupable",
    "split_groups",
]


@dataclass(frozen=True, slots=True)
class Grouping:
    """The division of replicas into groups that each have their own value of one parameter.

    Attributes:
        host: The user's parameter of shape [number of replica groups, ...].
        kind: The rule that assigns replicas to groups, for example ``Consecutive`` (neighbouring
            replicas form a group).
        size: The number of replicas in one group.
        retrieval: Whether a copy of the parameter from the device to the host writes one row for
            each replica group or one row for each replica.
    """

    host: torch.Tensor
    kind: CommGroupType
    size: int
    retrieval: VariableRetrievalMode

    def num_groups(self, replicas: int) -> int:
        """Return the number of groups that ``replicas`` replicas form."""
        if self.kind == CommGroupType.All:
            return 1
        if self.kind == CommGroupType.NoGrouping:
            return replicas
        return replicas // self.size

    def group_of(self, replica: int, replicas: int) -> int:
        """Return the index of the group that contains a replica.

        Args:
            replica: The index of the replica.
            replicas: The number of replicas of all instances together.
        """
        if self.kind == CommGroupType.All:
            return 0
        if self.kind == CommGroupType.NoGrouping:
            return replica
        if self.kind == CommGroupType.Orthogonal:
            return replica % (replicas // self.size)
        return replica // self.size

    def check(self, name: str, host: torch.Tensor, replicas: int) -> None:
        """Check that a parameter on the host has one row for each group of replicas.

        Args:
            name: The name of the parameter in the error message.
            host: The parameter on the host.
            replicas: The number of replicas of all instances together.

        Raises:
            Error: The parameter is 0-dimensional, or its number of rows differs from the number of
                replica groups.
        """
        if host.dim() == 0:
            raise Error(
                f"The parameter {name} is a scalar. Scalars cannot be passed as per-replica "
                "weight values"
            )
        if host.shape[0] != self.num_groups(replicas):
            raise Error(
                f"The parameter {name} has {counted(host.shape[0], 'row')}, but "
                f"{counted(replicas, 'replica')} in {counted(self.num_groups(replicas), 'group')} "
                "need one row for each group: give the first dimension of the parameter the size "
                f"{self.num_groups(replicas)}"
            )

    def write_host(self, rows: Sequence[torch.Tensor], replicas: int) -> None:
        """Replace the values of the parameter on the host by the values on the device.

        Args:
            rows: The device's values of the parameter, one tensor for each replica group.
            replicas: The number of replicas of all instances together. The parameter on the host
                gets one row for each replica if ``retrieval`` is AllReplicas, and one row for each
                group otherwise.
        """
        chosen: Sequence[torch.Tensor] = rows
        if self.retrieval == VariableRetrievalMode.AllReplicas:
            chosen = [rows[self.group_of(replica, replicas)] for replica in range(replicas)]
        self.host.data = torch.stack([row.detach() for row in chosen]).to(self.host.dtype)

    def read_host(self, num_groups: int, replicas: int) -> list[torch.Tensor]:
        """Return one row of the parameter on the host for each group of replicas.

        If the parameter on the host has one row for each replica, ``read_host`` returns the row of
        each group's first replica.
        """
        if self.host.shape[0] == num_groups:
            return list(self.host.detach())
        first = {self.group_of(replica, replicas): replica for replica in reversed(range(replicas))}
        return [self.host.detach()[first[group]] for group in range(num_groups)]


_groupings: WeakIdKeyDictionary = WeakIdKeyDictionary()


def grouping_of(parameter: torch.Tensor) -> Grouping | None:
    """Return the replica groups of ``parameter``; None if all replicas share one value."""
    grouping: Grouping | None = _groupings.get(parameter)
    return grouping


class GroupableParameter(nn.Parameter):
    """A parameter of a wrapped model, with PopTorch's method to group replicas."""

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give each group of replicas its own value of the parameter.

        The program must call ``replicaGrouping`` before the model is compiled.

        Args:
            comm_group_type: All, Consecutive, Orthogonal or NoGrouping.
            shards: The number of replicas in one group.
            variable_retrieval_mode: Whether a copy of the parameter to the host has one row for
                each group or one row for each replica.

        Raises:
            Error: The parameter is 0-dimensional.
        """
        if self.dim() == 0:
            raise Error(
                "replicaGrouping: Scalars cannot be passed as per-replica weight values. Use a "
                "parameter with at least one dimension"
            )
        _groupings[self] = Grouping(
            self, CommGroupType(comm_group_type), shards, variable_retrieval_mode
        )


def make_groupable(value: nn.Module | nn.Parameter) -> None:
    """Add the method ``replicaGrouping`` to a parameter, or to all parameters of a module."""
    parameters = value.parameters() if isinstance(value, nn.Module) else [value]
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = GroupableParameter


def join_groups(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the tensors of each parameter's replica groups, and return all tensors by name.

    For example, the tensors ``a[0]`` and ``a[1]`` of two replica groups become one tensor ``a``.
    """
    rows: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        rows.setdefault(_stem(name), []).append(tensor)
    return {
        stem: torch.stack(stem_rows) if stem not in tensors else stem_rows[0]
        for stem, stem_rows in rows.items()
    }


def split_groups(
    tensors: Mapping[str, torch.Tensor], parameters: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return ``tensors`` and additional tensors, one for each replica group of a parameter.

    The function ``split_groups`` reverses :func:`join_groups`, but the result also contains the
    stacked tensors.

    Args:
        tensors: The stacked tensors, with names of the form ``prefix___parameter``.
        parameters: The names of the device's parameters, such as ``weight[0]``.
    """
    split = dict(tensors)
    for parameter in parameters:
        stem = _stem(parameter)
        if stem == parameter:
            continue
        group = int(parameter[len(stem) + 1 : -1])
        for name, stacked in tensors.items():
            if name.endswith(f"___{stem}"):
                split[name.removesuffix(stem) + parameter] = stacked[group]
    return split


def _stem(name: str) -> str:
    """Return the name of a device parameter without a replica group's index in brackets."""
    return name.rpartition("[")[0] if name.endswith("]") else name
