"""The public collectives: arrays, tensors, scalars and containers of them, over a Communicator.

Here stands which of a communicator's calls a value takes. NumPy is imported on use. No data move
here: that is ``popdist_py.collectives``; what a value is as an array, ``leaf_arrays``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

from popdist_py import activities, context
from popdist_py.collectives import Communicator, ReduceOp
from popdist_py.collectives.signature import Signature
from popdist_py.value_tree import is_container, leaves, rebuilt

if TYPE_CHECKING:
    from popdist_py.collectives.background import Handle
    from popdist_py.public_collectives.leaf_arrays import Leaf

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather",
    "gather_object",
    "reduce_scatter",
    "synchronize",
]

_OPERATIONS = frozenset(get_args(ReduceOp))
# What comes back is of the type of what was given; that of a container is known as it is written:
# the mean of its whole numbers is a float all the same.
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
    """Reduce ``x`` element by element over all instances and return it.

    float16 and bfloat16 are added up in float32. For booleans ``sum`` and ``max`` mean "any",
    ``prod`` and ``min`` "all"; Python's True and False are counted as 1 and 0. The mean of whole
    numbers is a float; arrays and tensors of them have no mean, since they receive the result.

    Args:
        x: NumPy array or torch tensor (reduced in place), number, or dict, list, tuple or dataclass
            of them, nested as you like. Containers come back as new ones; an array that is in one
            twice is reduced once. Integers have 64 bits: results beyond wrap around.
        op: ``sum``, ``mean``, ``max``, ``min`` or ``prod``.
        name: compared between the instances, and shown in messages.
        async_op: return a Handle at once. Its ``wait()`` returns the result; nobody may touch ``x``
            before that.

    Raises:
        ValueError: an unknown ``op``, or an array that cannot receive the result.
        TypeError: ``x`` holds something that cannot be reduced, such as a text; nothing was
            reduced, on any instance.
        CollectiveMismatchError: the instances differ in keys, shape, dtype, op or name.
        InstanceLostError: another instance ended, or did not arrive in time.
    """
    if not async_op:
        # The way of most calls comes first: what runs here, the other instances wait for.
        array = _leaf_arrays().own_memory(x, op)
        if array is not None:
            communicator = context.communicator()
            with activities.doing(activities.REDUCING, "all_reduce"):
                communicator.all_reduce(array, op, name or "")
            return x
    _check_op("all_reduce", op)
    return _run("all_reduce", partial(_all_reduce, x, op, name or ""), async_op)


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
    """Return the ``x`` of instance ``root`` on all instances; arrays and tensors in place.

    Args:
        x: array, tensor, anything else that can be pickled, or dict, list, tuple or dataclass of
            them: of equal keys on all instances, and arrays of equal shape and dtype.
        root: index of the instance whose ``x`` is sent.
        name: compared between the instances, and shown in messages.
        async_op: return a Handle at once; its ``wait()`` returns ``x``.

    Raises:
        ValueError: there is no instance ``root``.
        CollectiveMismatchError: the instances differ in keys, shape, dtype, root or name.
        InstanceLostError: another instance ended, or did not arrive in time.
    """
    _check_root("broadcast", root)
    return _run("broadcast", partial(_broadcast, x, root, name or ""), async_op)


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
    """Return the ``obj`` of instance ``root`` on all instances, whatever the others pass.

    Objects travel as pickles. Unpickling runs what the sender says: the instances of a job are one
    program of one user, and no other process can send to them.

    Args:
        obj: anything that can be pickled, also large; alone it is returned as it is.
        root: index of the instance whose ``obj`` is sent.
        name: compared between the instances, and shown in messages.
        async_op: return a Handle at once; its ``wait()`` returns the object.

    Raises:
        ValueError: there is no instance ``root``.
        TypeError: the object of ``root`` cannot be pickled; on every instance.
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
        x: NumPy array or torch tensor of equal shape and dtype on all instances, or anything that
            can be pickled: numbers, texts, and dicts, lists and tuples of what you like.
        name: compared between the instances, and shown in messages.
        async_op: return a Handle at once, whose ``wait()`` returns the list.

    Raises:
        CollectiveMismatchError: the instances differ in shape, dtype or name.
        InstanceLostError: another instance ended, or did not arrive in time.
    """
    return _run("all_gather", partial(_gather, x, None, name or ""), async_op)


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
        obj: anything that can be pickled, as for ``broadcast_object``; also arrays and tensors
            whose shapes differ between the instances.
        name: as for ``all_gather``.
        async_op: return a Handle at once, whose ``wait()`` returns the list.

    Raises:
        TypeError: the object of an instance cannot be pickled; on every instance.
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
    """Return at instance ``root`` what ``all_gather`` returns, and None elsewhere.

    Args:
        x: as for ``all_gather``.
        root: index of the instance that gets the list.
        name: as for ``all_gather``.
        async_op: return a Handle at once, whose ``wait()`` returns the list or None.

    Raises:
        ValueError: there is no instance ``root``.
        CollectiveMismatchError: the instances differ in shape, dtype, root or name.
    """
    _check_root("gather", root)
    return _run("gather", partial(_gather, x, root, name or ""), async_op)


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
    """Return at instance ``root`` what ``all_gather_object`` returns, and None elsewhere.

    Args:
        obj: as for ``all_gather_object``.
        root: index of the instance that gets the list.
        name: as for ``all_gather``.
        async_op: return a Handle at once, whose ``wait()`` returns the list or None.

    Raises:
        ValueError: there is no instance ``root``.
        TypeError: the object of an instance cannot be pickled; there and at ``root``.
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
        x: array or tensor whose first dimension is a multiple of the number of instances; it is
            not changed.
        op: as for ``all_reduce``.
        name: as for ``all_reduce``.
        async_op: return a Handle at once, whose ``wait()`` returns the block.

    Raises:
        ValueError: an unknown ``op``, or a first dimension that cannot be divided.
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
    if async_op:  # the caller may go on to write to it
        x = _copy_of(x)
    return _run("reduce_scatter", partial(_reduce_scatter, x, op, name or ""), async_op)


def barrier() -> None:
    """Return once every instance has called this."""
    communicator = context.communicator()
    with activities.doing(activities.REDUCING, "barrier"):
        communicator.barrier()


def synchronize() -> None:
    """Wait for all instances (PopDist's name for ``barrier``)."""
    barrier()


@cache
def _leaf_arrays() -> ModuleType:
    """Return the module that imports NumPy: once, since an import costs as much as a small call."""
    from popdist_py.public_collectives import leaf_arrays

    return leaf_arrays


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


def _all_reduce(x: Any, op: ReduceOp, name: str, communicator: Communicator) -> Any:
    arrays = _leaf_arrays()
    reducible = arrays.reducible
    if not is_container(x):
        leaf = reducible(x, op)
        if leaf.array is None:
            raise _refused(communicator, Signature("all_reduce", f"op={op}", name=name), leaf)
        communicator.all_reduce(leaf.array, op, name)
        return leaf.result()
    call = Signature("all_reduce", f"op={op}", name=name)
    values = _leaves(communicator, call, x)
    given = arrays.marking_repeats((path, reducible(value, op)) for path, value in values)
    _agree(communicator, call, x, given)
    for path, leaf in given:
        if leaf.same_as is None:
            communicator.all_reduce(leaf.array, op, name + path)
    return rebuilt(x, (leaf.result() for _, leaf in given))


def _reduce_scatter(x: Any, op: ReduceOp, name: str, communicator: Communicator) -> Any:
    host_memory = communicator.host_memory
    if host_memory is None:
        rows = x.shape[0] // communicator.num_instances
        first = communicator.instance_index * rows
        return _all_reduce(_copy_of(x), op, name, communicator)[first : first + rows]
    arrays = _leaf_arrays()
    array = arrays.own_memory(x, op)
    if array is None:
        leaf = arrays.reducible(x, op, needs_writing=False)
        if leaf.array is None:
            call = Signature("reduce_scatter", f"op={op}", name=name)
            raise _refused(communicator, call, leaf)
        array = leaf.array
    block = host_memory.reduce_scatter(array, op, name)
    return arrays.tensor_like(x, block) if arrays.is_tensor(x) else block


def _copy_of(x: Any) -> Any:
    return x.detach().clone() if hasattr(x, "detach") else x.copy()


def _broadcast(x: Any, root: int, name: str, communicator: Communicator) -> Any:
    """Send arrays and tensors one by one, and everything else in one pickle."""
    arrays = _leaf_arrays()
    array = arrays.own_memory(x)
    if array is not None:
        communicator.broadcast(array, root, name)
        return x
    movable = arrays.movable
    is_root = communicator.instances[communicator.instance_index] == root
    call = Signature("broadcast", f"root={root}", name=name)
    if not is_container(x):
        leaf = movable(x, needs_writing=not is_root)
        if leaf is None:
            return communicator.broadcast_object(x, root, name)
        if leaf.array is None:
            raise _refused(communicator, call, leaf)
        communicator.broadcast(leaf.array, root, name)
        return leaf.result()
    values = _leaves(communicator, call, x)
    given = [(path, movable(value, needs_writing=not is_root)) for path, value in values]
    _agree(communicator, call, x, given)
    objects = values
    if any(leaf is None for _, leaf in given):
        # The arrays stay out of the pickle; the containers go along, so that messages name keys.
        hollow = rebuilt(
            x,
            (
                value if leaf is None else None
                for (_, value), (_, leaf) in zip(values, given, strict=True)
            ),
        )
        objects = leaves(communicator.broadcast_object(hollow, root, name))
    for path, leaf in given:
        if leaf is not None:
            communicator.broadcast(leaf.array, root, name + path)
    pairs = zip(objects, given, strict=True)
    return rebuilt(x, (sent if leaf is None else leaf.result() for (_, sent), (_, leaf) in pairs))


def _leaves(communicator: Communicator, call: Signature, x: Any) -> list[tuple[str, Any]]:
    """Return path and value of every leaf of ``x``.

    Raises:
        ValueError: a container contains itself. Every instance raises it.
    """
    try:
        return leaves(x)
    except ValueError as error:
        raise _refused(communicator, call, _leaf_arrays().Leaf(None, lambda: None, error)) from None


def _agree(
    communicator: Communicator,
    call: Signature,
    x: Any,
    given: Sequence[tuple[str, Leaf | None]],
) -> None:
    """Return once all instances have containers of like leaves.

    Otherwise some instances would wait for leaves that others do not have, or cannot send.

    Args:
        communicator: of the instances.
        call: what all of them make.
        x: the container of this instance.
        given: path and array of each leaf; None for one that is pickled.

    Raises:
        TypeError: all instances have a leaf that cannot take part; ValueError likewise.
        CollectiveMismatchError: the leaves differ.
    """
    variable = call.name or "x"
    kinds = ((variable + path, leaf.kind if leaf else "a pickled object") for path, leaf in given)
    detail = f"{call.detail}, of a {type(x).__name__}"
    communicator.agree(Signature(call.call, detail, name=call.name, leaves=tuple(kinds)))
    for path, leaf in given:
        if leaf and leaf.refusal:
            raise type(leaf.refusal)(f"{call.call}: {variable}{path} is {leaf.refusal}")


def _refused(communicator: Communicator, call: Signature, leaf: Leaf) -> Exception:
    """Return the error for a value that cannot take part, once all instances know of it.

    Raises:
        CollectiveMismatchError: other instances have another value.
    """
    assert leaf.refusal is not None
    communicator.agree(replace(call, detail=f"{call.detail}, of {leaf.refusal}"))
    return type(leaf.refusal)(f"{call.call}: {call.name or 'x'} is {leaf.refusal}")


def _gather(x: Any, root: int | None, name: str, communicator: Communicator) -> list[Any] | None:
    arrays = _leaf_arrays()
    array = arrays.own_memory(x)
    if array is None:
        leaf = arrays.movable(x, needs_writing=False)
        if leaf is None or leaf.array is None:
            if root is None:
                return communicator.all_gather_object(x, name)
            return communicator.gather_object(x, root, name)
        array = leaf.array
    rows = (
        communicator.all_gather(array, name)
        if root is None
        else communicator.gather(array, root, name)
    )
    if rows is None:
        return None
    # Rows of a vector would be numbers.
    gathered = list(rows) if array.ndim else [row.reshape(()) for row in rows[:, None]]
    return [arrays.tensor_like(x, row) for row in gathered] if arrays.is_tensor(x) else gathered
