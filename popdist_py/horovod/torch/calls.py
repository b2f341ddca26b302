"""Operators, argument checks and handles of Horovod's collective calls.

For each collective that a program calls, the ``_ops`` modules build a ``Call``. A ``Call`` runs
either at once, or in the background. Its ``Handle`` then waits for the result.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final

import torch

from popdist_py import activities
from popdist_py.collectives import Communicator
from popdist_py.collectives import ReduceOp as ArrayOp
from popdist_py.collectives.arithmetic import Array
from popdist_py.collectives.background import Handle as BackgroundCall
from popdist_py.collectives.signature import Signature
from popdist_py.errors import CollectiveMismatchError
from popdist_py.horovod.common.exceptions import HorovodInternalError
from popdist_py.horovod.torch.basics import (
    ProcessSet,
    check_process_set,
    communicator,
    global_process_set,
)
from popdist_py.horovod.torch.errors import horovod_errors
from popdist_py.public_collectives import leaf_arrays

__all__ = [
    "ARRAY_OPS",
    "Adasum",
    "Average",
    "Call",
    "Handle",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "Tensor",
    "Tensors",
    "array_of",
    "barrier",
    "check_names",
    "check_op",
    "check_optimizer",
    "check_rows",
    "check_tensor",
    "checked_copy",
    "differentiable",
    "is_root",
    "is_whole",
    "join",
    "leaf_of",
    "numbered",
    "poll",
    "started_together",
    "synchronize",
]


Tensor = torch.Tensor
Tensors = Sequence[torch.Tensor]


class ReduceOp(IntEnum):
    """The operators of reductions, with the same numbers as in Horovod."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum = ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum
Min, Max, Product = ReduceOp.Min, ReduceOp.Max, ReduceOp.Product

ARRAY_OPS: Final[dict[ReduceOp, ArrayOp]] = {
    Average: "mean",
    Sum: "sum",
    Min: "min",
    Max: "max",
    Product: "prod",
}


class Handle:
    """A collective call that runs in the background. Programs pass it to ``synchronize``."""

    def __init__(self, work: BackgroundCall[Any], finish: Callable[[Any], Any]) -> None:
        self._work = work
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None

    def is_completed(self) -> bool:
        """Tell whether the call is complete, so that ``wait`` returns at once."""
        return self._work.is_completed()

    def wait(self) -> Any:
        """Wait for the call and return its result. A second ``wait`` returns the same object."""
        if self._finish is not None:
            with horovod_errors():
                done = self._work.wait()
            self._result = self._finish(done)
            self._finish = None
        return self._result


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call.

    Attributes:
        world: The communicator of the call.
        name: The name of the equivalent collective in ``popdist_py``.
        run: The function that communicates. This function may run in any thread.
        finish: The function that converts the result of ``run``. This function runs in the thread
            of the program. In another thread, torch would start a second set of worker threads.
        names: The names that the program gave to its tensors.
    """

    world: Communicator
    name: str
    run: Callable[[], Any]
    finish: Callable[[Any], Any]
    names: Sequence[str] = field(default=())

    def now(self) -> Any:
        """Run the call and return its result.

        Raises:
            HorovodInternalError: The call failed. The error is also an instance of PopdistError.
            ValueError: Another asynchronous call with one of the names is still running.
        """
        check_names(self.name, self.names)
        with horovod_errors(), activities.doing(activities.REDUCING, self.name):
            done = self.run()
        return self.finish(done)

    def start(self) -> Handle:
        """Run the call in the background and return its handle.

        Raises:
            ValueError: Another asynchronous call with one of the names is still running.
        """
        check_names(self.name, self.names)
        work = self.world.background.submit(self.run, self.name)
        for each in self.names:
            if _is_given(each):
                _started[self.name, each] = work
        return Handle(work, self.finish)

    def then(self, function: Callable[[Any], Any]) -> Call:
        """Return a call whose result is ``function`` applied to the result of this call."""
        return replace(self, finish=lambda done: function(self.finish(done)))


# The running asynchronous calls that the program gave names to. The key of a call is a pair of its
# operation and its name.
_started: weakref.WeakValueDictionary[tuple[str, str], BackgroundCall[Any]] = (
    weakref.WeakValueDictionary()
)


def check_names(call: str, names: Sequence[str]) -> None:
    """Raise ValueError if an asynchronous call with one of the names is still running."""
    for name in names:
        work = _started.get((call, name))
        if work is not None and not work.is_completed():
            raise ValueError(
                f"name={name!r}: Requested to {call} a tensor with the same name as another tensor "
                "that is currently being processed. If you want to request another tensor, use a "
                "different tensor name."
            )


def _is_given(name: str) -> bool:
    """Tell whether the program chose this name; generated names contain ``.noname``."""
    return bool(name) and ".noname" not in name


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous call and return its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Tell whether an asynchronous call is complete, so that ``synchronize`` returns at once."""
    return handle.is_completed()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has called this function."""
    check_process_set(process_set)
    with horovod_errors(), activities.doing(activities.REDUCING, "barrier"):
        communicator().barrier()


def join(device: int = -1) -> int:  # noqa: ARG001
    """Wait until all ranks have called this function, which they must do at the same step.

    Args:
        device: This argument is ignored.

    Returns:
        The highest rank. Horovod returns the last rank that joined, but here all ranks join at the
        same step.

    Raises:
        HorovodInternalError: Another rank called another collective, for example because it has
            more batches.
    """
    world = communicator()
    try:
        with horovod_errors():
            world.agree(Signature("join"))
    except CollectiveMismatchError as error:
        raise HorovodInternalError(
            f"join(): {error}. After join(), a rank cannot take part in calls of other ranks, so "
            "all ranks need the same number of batches"
        ) from None
    return world.num_instances - 1


def check_op(
    op: ReduceOp | int | None, average: bool | None = None, stacklevel: int = 3
) -> ReduceOp:
    """Return the operator that is selected by ``op`` or by the deprecated argument ``average``.

    ``stacklevel`` is passed to ``warnings.warn``. It makes the warning about ``average`` show a
    line of the user's program.

    Raises:
        ValueError: The caller gave both ``op`` and ``average``, or ``op`` is not an operator.
        NotImplementedError: Adasum is not available.
    """
    if average is not None:
        if op is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        return Average if average else Sum
    if op is None:
        return Average
    try:
        op = ReduceOp(op)
    except ValueError:
        names = ", ".join(each.name for each in ARRAY_OPS)
        raise ValueError(f"op={op!r}: expected one of {names}") from None
    if op is Adasum:
        raise NotImplementedError("op=Adasum is not available in popdist_py: use Average or Sum")
    return op


def check_tensor(call: str, x: Any) -> None:
    """Raise TypeError unless ``x`` is a dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{call}({x!r:.40}): expected a torch tensor, such as torch.tensor(...)")
    if x.layout is not torch.strided:
        raise TypeError(
            f"{call}: expected a dense tensor, got a tensor of layout {x.layout}. Pass "
            "tensor.to_dense(), or use sparse_allreduce_async()"
        )


def check_optimizer(call: str, optimizer: Any) -> None:
    """Raise TypeError unless ``optimizer`` is a torch optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{call}: expected an optimizer of torch.optim, got an object of type "
            f"{type(optimizer).__name__}"
        )


def is_root(call: str, root_rank: int) -> bool:
    """Tell whether this process is rank ``root_rank``.

    Inside ``execute_on_instances``, ``root_rank`` must be one of the listed instances.

    Raises:
        ValueError: ``root_rank`` is not a rank of the job or group.
    """
    world = communicator()
    if not is_whole(root_rank) or root_rank not in world.instances:
        raise ValueError(
            f"{call}(root_rank={root_rank!r}): expected one of the ranks {list(world.instances)}"
        )
    return world.instances[world.instance_index] == root_rank


def is_whole(x: Any) -> bool:
    """Tell whether a value is an integer, such as an int or a NumPy or torch integer."""
    try:
        operator.index(x)
    except (TypeError, RuntimeError):
        return False
    return True


def check_rows(call: str, x: Any) -> None:
    """Raise an error unless ``x`` is a dense tensor that has a first dimension."""
    check_tensor(call, x)
    if x.dim() == 0:
        raise ValueError(
            f"{call}: expected a tensor with at least one dimension, got a tensor without "
            "dimensions. Pass tensor.unsqueeze(0)"
        )


def leaf_of(call: str, leaf: leaf_arrays.Leaf | None) -> tuple[Array, Callable[[], Any]]:
    """Return the array of a tensor, and the function that copies the array back to the tensor."""
    assert leaf is not None
    if leaf.array is None:
        assert leaf.refusal is not None
        raise type(leaf.refusal)(f"{call}: {leaf.refusal}")
    return leaf.array, leaf.result


def array_of(call: str, x: Tensor) -> Array:
    """Return an array with the values of a tensor that this rank will send."""
    return leaf_of(call, leaf_arrays.movable(x, needs_writing=False))[0]


def numbered(function: str, name: str | None, count: int) -> list[str]:
    """Return a name for each tensor of a group.

    The names contain the group's name. For an unnamed group, they contain the name of ``function``.
    """
    return [f"{name or f'{function}.noname'}.{i}" for i in range(count)]


def started_together(calls: Sequence[Call]) -> Handle:
    """Start several calls and return one handle for all of them."""
    return Call(
        communicator(),
        calls[0].name if calls else "",
        lambda: [call.run() for call in calls],
        lambda done: [call.finish(each) for call, each in zip(calls, done, strict=True)],
        [name for call in calls for name in call.names],
    ).start()


def checked_copy(call: str, x: Tensor) -> Tensor:
    """Return a contiguous copy of a dense tensor, without a gradient.

    Raises:
        TypeError: ``x`` is not a dense tensor.
    """
    check_tensor(call, x)
    return x.detach().clone(memory_format=torch.contiguous_format)


def differentiable(function: Any, *args: Any) -> Any:
    """Call ``function.apply``, for which torch does not declare types."""
    return function.apply(*args)
