"""Replica-grouped weights: parameters whose value differs between groups of replicas.

The host's tensor has a leading dimension, one row for each group; a forward sees a row.
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
    """How the replicas share one parameter.

    Attributes:
        host: the user's parameter, [number of groups, ...].
        kind: how groups are formed.
        size: replicas in one group.
        retrieval: whether the host reads one value for each group or for each replica.
    """

    host: torch.Tensor
    kind: CommGroupType
    size: int
    retrieval: VariableRetrievalMode

    def num_groups(self, replicas: int) -> int:
        """Return the number of groups of ``replicas``."""
        if self.kind == CommGroupType.All:
            return 1
        if self.kind == CommGroupType.NoGrouping:
            return replicas
        return replicas // self.size

    def group_of(self, replica: int, replicas: int) -> int:
        """Return the group of a replica."""
        if self.kind == CommGroupType.All:
            return 0
        if self.kind == CommGroupType.NoGrouping:
            return replica
        if self.kind == CommGroupType.Orthogonal:
            return replica % (replicas // self.size)
        return replica // self.size

    def check(self, name: str, host: torch.Tensor, replicas: int) -> None:
        """Check the shape of the host's tensor.

        Raises:
            Error: it is 0-d, or has another number of rows than there are groups.
        """
        if host.dim() == 0:
            raise Error(f"{name}: Scalars cannot be passed as per-replica weight values")
        if host.shape[0] != self.num_groups(replicas):
            raise Error(
                f"{name} has {counted(host.shape[0], 'row')}, but "
                f"{counted(replicas, 'replica')} in {counted(self.num_groups(replicas), 'group')} "
                "need one row for each group: its first dimension must be that number"
            )

    def write_host(self, rows: Sequence[torch.Tensor], replicas: int) -> None:
        """Give the host the rows: one for each group, or one for each replica."""
        chosen: Sequence[torch.Tensor] = rows
        if self.retrieval == VariableRetrievalMode.AllReplicas:
            chosen = [rows[self.group_of(replica, replicas)] for replica in range(replicas)]
        self.host.data = torch.stack([row.detach() for row in chosen]).to(self.host.dtype)

    def read_host(self, num_groups: int, replicas: int) -> list[torch.Tensor]:
        """Return the host's row of each group."""
        if self.host.shape[0] == num_groups:
            return list(self.host.detach())
        first = {self.group_of(replica, replicas): replica for replica in reversed(range(replicas))}
        return [self.host.detach()[first[group]] for group in range(num_groups)]


_groupings: WeakIdKeyDictionary = WeakIdKeyDictionary()


def grouping_of(parameter: torch.Tensor) -> Grouping | None:
    """Return how the replicas share ``parameter``; None if all have the same."""
    grouping: Grouping | None = _groupings.get(parameter)
    return grouping


class GroupableParameter(nn.Parameter):
    """A parameter reached through a wrapper, which can be told how replicas share it."""

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give groups of replicas their own values; call it before compiling.

        Args:
            comm_group_type: All, Consecutive, Orthogonal or NoGrouping.
            shards: number of replicas in one group.
            variable_retrieval_mode: what the host reads.

        Raises:
            Error: the parameter is 0-d.
        """
        if self.dim() == 0:
            raise Error("Scalars cannot be passed as per-replica weight values")
        _groupings[self] = Grouping(
            self, CommGroupType(comm_group_type), shards, variable_retrieval_mode
        )


def make_groupable(value: nn.Module | nn.Parameter) -> None:
    """Let the parameters of ``value`` be grouped."""
    parameters = value.parameters() if isinstance(value, nn.Module) else [value]
    for parameter in parameters:
        if type(parameter) is nn.Parameter:
            parameter.__class__ = GroupableParameter


def join_groups(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors by name with those of a parameter's groups stacked: a[0], a[1] -> a."""
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
    """Undo :func:`join_groups` for tensors, ``prefix___name``, of these device parameters."""
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
    """Return a name without the group's number."""
    return name.rpartition("[")[0] if name.endswith("]") else name
