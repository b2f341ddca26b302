"""The public collectives for arrays, tensors, numbers, other objects, and containers of these.

Every collective of this module first checks its arguments. After the checks, the collective calls a
function of ``value_calls`` or a method of the communicator, either at once or in the background.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

from popdist_py import activities, context
from popdist_py.collectives import Communicator, ReduceOp
from popdist_py.public_collectives import value_calls

if TYPE_CHECKING:
    from popdist_py.collectives.background import Handle

_OPERATIONS = frozenset(get_args(ReduceOp))
# For type checkers, the result of a collective has the type of its argument. The declared type is
# not exact for containers, because the mean of an integer in a container is a float.
X = TypeVar("X")
_NotMean = Literal["sum", "max", "min", "prod"]


@overload
def all_reduce(
    x: int, op: _NotMean = "sum", name: str | None = None, *, async_op: Literal[False] = False
) -> int: ...
@overload
def all_reduce(
    x: int, op: Literal["mean"], name: str | None = None, *, async_op: Literal[False] = False
) -> float: ...
@overload
def all_reduce(
    x: X, op: ReduceOp = "sum", name: str | None = None, *, async_op: Literal[False] = False
) -> X: ...
@overload
def all_reduce(
    x: int, op: _NotMean = "sum", name: str | None = None, *, async_op: Literal[True]
) -> Handle[int]: ...
@overload
def all_reduce(
    x: int, op: Literal["mean"], name: str | None = None, *, async_op: Literal[True]
) -> Handle[float]: ...
@overload
def all_reduce(
    x: X, op: ReduceOp = "sum", name: str | None = None, *, async_op: Literal[True]
) -> Handle[X]: ...
@overload
def all_reduce(
    x: X, op: ReduceOp = "sum", name: str | None = None, *, async_op: bool
) -> X | Handle[X]: ...
def all_reduce(
    x: Any, op: ReduceOp = "sum", name: str | None = None, *, async_op: bool = False
) -> Any:
    """Reduce ``x`` element by element over all instances and return the result.

    float16 and bfloat16 values are added in float32. For boolean arrays, ``sum`` and ``max`` mean
    "any", and ``prod`` and ``min`` mean "all". Python's True and False count as 1 and 0. The mean
    of Python integers is a float. ``mean`` does not accept arrays and tensors of integers, because
    integers cannot store the mean.

    Args:
        x: A NumPy array or torch tensor, which is reduced in place; a number; or a nested dict,
            list, tuple or dataclass of these. For a container, a new container is returned. If a
            container contains the same array twice, this array is reduced once. Python integers
            become 64-bit integers, which wrap around on overflow.
        op: The operation ``sum``, ``mean``, ``max``, ``min`` or ``prod``.
        name: A name for error messages. All instances must pass the same name.
        async_op: If true, return a Handle at once. ``Handle.wait`` returns the result. The
            program must not use ``x`` until ``Handle.wait`` has returned.

    Raises:
        ValueError: The ``op`` is unknown, or the result cannot be stored, for example in a
            read-only array.
        TypeError: A value in ``x`` cannot be reduced, such as a string. When this error is raised,
            no instance has reduced any value.
        CollectiveMismatchError: The instances differ in keys, shape, dtype, op or name.
        InstanceLostError: Another instance has ended or did not make the call in time.
    """
    if not async_op:
        # Most calls take this fast path. The fast path is short, because the other instances wait
        # for this instance.
        array = value_calls.leaf_arrays().own_memory(x, op)
        if array is not None:
            communicator = context.communicator()
            with activities.doing(activities.REDUCING, "all_reduce"):
                communicator.all_reduce(array, op, name or "")
            if array is not x:
                value_calls.leaf_arrays().mark_changed(x)
            return x
    _check_op("all_reduce", op)
    return _run("all_reduce", partial(value_calls.all_reduce, x, op, name or ""), async_op)


@overload
def broadcast(
    x: X, root: int = 0, name: str | None = None, *, async_op: Literal[False] = False
) -> X: ...
@overload
def broadcast(
    x: X, root: int = 0, name: str | None = None, *, async_op: Literal[True]
) -> Handle[X]: ...
@overload
def broadcast(x: X, root: int = 0, name: str | None = None, *, async_op: bool) -> X | Handle[X]: ...
def broadcast(x: Any, root: int = 0, name: str | None = None, *, async_op: bool = False) -> Any:
    """Send the ``x`` of instance ``root`` to all instances and return it.

    On the other instances, arrays and tensors are overwritten with the values from ``root``.

    Args:
        x: An array, a tensor, any other object that can be pickled, or a dict, list, tuple or
            dataclass of these. Keys, shapes and dtypes must be equal on all instances.
        root: The index of the instance whose ``x`` is sent.
        name: A name for error messages. All instances must pass the same name.
        async_op: If true, return a Handle at once. ``Handle.wait`` returns ``x``.

    Raises:
        ValueError: ``root`` is not the index of an instance.
        CollectiveMismatchError: The instances differ in keys, shape, dtype, root or name.
        InstanceLostError: Another instance has ended or did not make the call in time.
    """
    _check_root("broadcast", root)
    return _run("broadcast", partial(value_calls.broadcast, x, root, name or ""), async_op)


@overload
def broadcast_object(
    obj: X, root: int = 0, name: str | None = None, *, async_op: Literal[False] = False
) -> X: ...
@overload
def broadcast_object(
    obj: X, root: int = 0, name: str | None = None, *, async_op: Literal[True]
) -> Handle[X]: ...
@overload
def broadcast_object(
    obj: X, root: int = 0, name: str | None = None, *, async_op: bool
) -> X | Handle[X]: ...
def broadcast_object(
    obj: Any, root: int = 0, name: str | None = None, *, async_op: bool = False
) -> Any:
    """Send the ``obj`` of instance ``root`` to all instances and return it.

    The ``obj`` arguments of the other instances are ignored. The object is sent as a pickle. A
    pickle can contain code that runs when it is read. Reading the pickle is safe, because all
    instances of a job run programs of the same user, and other processes cannot send data to them.

    Args:
        obj: An object of any size that can be pickled. If the job has a single instance, the object
            itself is returned instead of a copy.
        root: The index of the instance whose ``obj`` is sent.
        name: A name for error messages. All instances must pass the same name.
        async_op: If true, return a Handle at once. ``Handle.wait`` returns the object.

    Raises:
        ValueError: ``root`` is not the index of an instance.
        TypeError: The object of ``root`` cannot be pickled. Every instance raises this error.
    """
    _check_root("broadcast_object", root)
    return _run(
        "broadcast_object", lambda comm: comm.broadcast_object(obj, root, name or ""), async_op
    )


@overload
def all_gather(x: X, name: str | None = None, *, async_op: Literal[False] = False) -> list[X]: ...
@overload
def all_gather(x: X, name: str | None = None, *, async_op: Literal[True]) -> Handle[list[X]]: ...
@overload
def all_gather(x: X, name: str | None = None, *, async_op: bool) -> list[X] | Handle[list[X]]: ...
def all_gather(x: Any, name: str | None = None, *, async_op: bool = False) -> Any:
    """Return the ``x`` of every instance as a list, in instance order.

    Args:
        x: A NumPy array or torch tensor of equal shape and dtype on all instances, or any other
            object that can be pickled, such as a number, a string or a container.
        name: A name for error messages. All instances must pass the same name.
        async_op: If true, return a Handle at once. ``Handle.wait`` returns the list.

    Raises:
        CollectiveMismatchError: The instances differ in shape, dtype or name.
        InstanceLostError: Another instance has ended or did not make the call in time.
    """
    return _run("all_gather", partial(value_calls.gather, x, None, name or ""), async_op)


@overload
def all_gather_object(
    obj: X, name: str | None = None, *, async_op: Literal[False] = False
) -> list[X]: ...
@overload
def all_gather_object(
    obj: X, name: str | None = None, *, async_op: Literal[True]
) -> Handle[list[X]]: ...
@overload
def all_gather_object(
    obj: X, name: str | None = None, *, async_op: bool
) -> list[X] | Handle[list[X]]: ...
def all_gather_object(obj: Any, name: str | None = None, *, async_op: bool = False) -> Any:
    """Return the ``obj`` of every instance as a list, in instance order.

    Args:
        obj: An object that can be pickled. Arrays and tensors in the object may have different
            shapes on different instances.
        name: A name for error messages. All instances must pass the same name.
        async_op: If true, return a Handle at once. ``Handle.wait`` returns the list.

    Raises:
        TypeError: The object of an instance cannot be pickled. Every instance raises this error.
    """
    return _run("all_gather_object", lambda comm: comm.all_gather_object(obj, name or ""), async_op)


@overload
def gather(
    x: X, root: int = 0, name: str | None = None, *, async_op: Literal[False] = False
) -> list[X] | None: ...
@overload
def gather(
    x: X, root: int = 0, name: str | None = None, *, async_op: Literal[True]
) -> Handle[list[X] | None]: ...
@overload
def gather(
    x: X, root: int = 0, name: str | None = None, *, async_op: bool
) -> list[X] | Handle[list[X] | None] | None: ...
def gather(x: Any, root: int = 0, name: str | None = None, *, async_op: bool = False) -> Any:
    """Return the ``x`` of all instances as a list on instance ``root``, and None on the others.

    Args:
        x: Any value that ``all_gather`` accepts.
        root: The index of the instance that gets the list.
        name: A name for error messages. All instances must pass the same name.
        async_op: If true, return a Handle at once. ``Handle.wait`` returns the list or None.

    Raises:
        ValueError: ``root`` is not the index of an instance.
        CollectiveMismatchError: The instances differ in shape, dtype, root or name.
    """
    _check_root("gather", root)
    return _run("gather", partial(value_calls.gather, x, root, name or ""), async_op)


@overload
def gather_object(
    obj: X, root: int = 0, name: str | None = None, *, async_op: Literal[False] = False
) -> list[X] | None: ...
@overload
def gather_object(
    obj: X, root: int = 0, name: str | None = None, *, async_op: Literal[True]
) -> Handle[list[X] | None]: ...
@overload
def gather_object(
    obj: X, root: int = 0, name: str | None = None, *, async_op: bool
) -> list[X] | Handle[list[X] | None] | None: ...
def gather_object(
    obj: Any, root: int = 0, name: str | None = None, *, async_op: bool = False
) -> Any:
    """Return the ``obj`` of all instances as a list on instance ``root``, None on the others.

    Args:
        obj: An object that can be pickled. Arrays and tensors in the object may have different
            shapes on different instances.
        root: The index of the instance that gets the list.
        name: A name for error messages. All instances must pass the same name.
        async_op: If true, return a Handle at once. ``Handle.wait`` returns the list or None.

    Raises:
        ValueError: ``root`` is not the index of an instance.
        TypeError: The object of an instance cannot be pickled. The instance with this object and
            instance ``root`` raise the error.
    """
    _check_root("gather_object", root)
    return _run("gather_object", lambda comm: comm.gather_object(obj, root, name or ""), async_op)


@overload
def reduce_scatter(
    x: X, op: ReduceOp = "sum", name: str | None = None, *, async_op: Literal[False] = False
) -> X: ...
@overload
def reduce_scatter(
    x: X, op: ReduceOp = "sum", name: str | None = None, *, async_op: Literal[True]
) -> Handle[X]: ...
@overload
def reduce_scatter(
    x: X, op: ReduceOp = "sum", name: str | None = None, *, async_op: bool
) -> X | Handle[X]: ...
def reduce_scatter(
    x: Any, op: ReduceOp = "sum", name: str | None = None, *, async_op: bool = False
) -> Any:
    """Reduce ``x`` over all instances and return this instance's block of the first dimension.

    Args:
        x: An array or tensor, which remains unchanged. The size of its first dimension must be a
            multiple of the number of instances.
        op: The operation ``sum``, ``mean``, ``max``, ``min`` or ``prod``.
        name: A name for error messages. All instances must pass the same name.
        async_op: If true, return a Handle at once. ``Handle.wait`` returns the block.

    Raises:
        ValueError: The ``op`` is unknown, or the size of the first dimension is not a multiple of
            the number of instances.
    """
    _check_op("reduce_scatter", op)
    communicator = context.communicator()
    num_instances = communicator.num_instances
    shape = getattr(x, "shape", ())
    if not shape or shape[0] % num_instances:
        raise ValueError(
            "reduce_scatter: expected an array whose first dimension is a multiple of "
            f"{num_instances}, the number of instances; got "
            + (f"shape {tuple(shape)}" if hasattr(x, "shape") else type(x).__name__)
        )
    if async_op:  # the program may change x before the background call reads it
        x = value_calls.copy_of(x)
    return _run("reduce_scatter", partial(value_calls.reduce_scatter, x, op, name or ""), async_op)


def barrier() -> None:
    """Wait until every instance has called this function."""
    communicator = context.communicator()
    with activities.doing(activities.REDUCING, "barrier"):
        communicator.barrier()


def synchronize() -> None:
    """Wait for all instances (PopDist's name for ``barrier``)."""
    barrier()


def _run(name: str, call: Callable[[Communicator], Any], async_op: bool) -> Any:
    communicator = context.communicator()
    if async_op:
        return communicator.background.submit(partial(call, communicator), name)
    with activities.doing(activities.REDUCING, name):
        return call(communicator)


def _check_op(call: str, op: ReduceOp) -> None:
    if not isinstance(op, str) or op not in _OPERATIONS:
        raise ValueError(f"{call}(op={op!r}): expected one of {', '.join(get_args(ReduceOp))}")


def _check_root(call: str, root: int) -> None:
    instances = context.communicator().instances
    if not hasattr(root, "__index__") or root not in instances:
        raise ValueError(f"{call}(root={root!r}): expected one of the instances {list(instances)}")
