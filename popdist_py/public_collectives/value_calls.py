"""Collectives for one value: an array, a tensor, a number, another object or a container.

NumPy is imported at the first call, because many programs import the public collectives and never
call them. The functions of ``popdist_py.collectives`` send the data between the instances.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from popdist_py.collectives import Communicator, ReduceOp
from popdist_py.collectives.signature import Signature
from popdist_py.value_tree import is_container, leaves, rebuilt

if TYPE_CHECKING:
    from popdist_py.public_collectives.leaf_arrays import Leaf


@cache
def leaf_arrays() -> ModuleType:
    """Return the module ``leaf_arrays``, which imports NumPy.

    The module is cached, because even a repeated import statement takes as long as a small
    collective call.
    """
    from popdist_py.public_collectives import leaf_arrays as module

    return module


def all_reduce(x: Any, op: ReduceOp, name: str, communicator: Communicator) -> Any:
    """Reduce a value over all instances. The leaves of a container are reduced one by one."""
    arrays = leaf_arrays()
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
    with _as_one_call(communicator, "all_reduce"):
        _agree(communicator, call, x, given)
        for path, leaf in given:
            if leaf.same_as is None:
                communicator.all_reduce(leaf.array, op, name + path)
    return rebuilt(x, (leaf.result() for _, leaf in given))


def reduce_scatter(x: Any, op: ReduceOp, name: str, communicator: Communicator) -> Any:
    """Return this instance's block of the reduced array or tensor ``x``."""
    arrays = leaf_arrays()
    array = arrays.own_memory(x, op)
    if array is None:
        leaf = arrays.reducible(x, op, needs_writing=False)
        if leaf.array is None:
            call = Signature("reduce_scatter", f"op={op}", name=name)
            raise _refused(communicator, call, leaf)
        array = leaf.array
    block = communicator.reduce_scatter(array, op, name)
    return arrays.tensor_like(x, block) if arrays.is_tensor(x) else block


def broadcast(x: Any, root: int, name: str, communicator: Communicator) -> Any:
    """Send a value from ``root`` to all instances.

    The arrays and tensors of a container are sent one by one. All other values in the container are
    sent in one pickle.
    """
    arrays = leaf_arrays()
    is_root = communicator.instances[communicator.instance_index] == root
    array = arrays.own_memory(x)
    if array is not None:
        communicator.broadcast(array, root, name)
        if array is not x and not is_root:
            arrays.mark_changed(x)
        return x
    movable = arrays.movable
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
    objects = values
    with _as_one_call(communicator, "broadcast"):
        _agree(communicator, call, x, given)
        if any(leaf is None for _, leaf in given):
            # The pickle contains the whole container, with None in place of each array. So the
            # error message can name the key of an object that cannot be pickled.
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


@contextmanager
def _as_one_call(communicator: Communicator, call: str) -> Iterator[None]:
    """Handle an interrupt between two leaves of a container like an interrupt within a call.

    Without this function, an instance could make another call after an interrupt, while the other
    instances wait for its next leaf, the next array of the container. The other instances would
    mistake the data of the new call for the leaf.
    """
    try:
        yield
    except BaseException as error:
        communicator.end_if_interrupted(call, error)
        raise


def _leaves(communicator: Communicator, call: Signature, x: Any) -> list[tuple[str, Any]]:
    """Return the path and the value of every leaf of ``x``.

    Raises:
        ValueError: A container contains itself as an item. Every instance raises this error.
    """
    try:
        return leaves(x)
    except ValueError as error:
        raise _refused(communicator, call, leaf_arrays().Leaf(None, lambda: None, error)) from None


def _agree(
    communicator: Communicator,
    call: Signature,
    x: Any,
    given: Sequence[tuple[str, Leaf | None]],
) -> None:
    """Check that all instances have containers with equal keys, shapes and dtypes.

    Without this check, an instance could wait forever for a leaf that another instance does not
    send.

    Args:
        communicator: The communicator of the instances.
        call: The call that all instances make.
        x: The container of this instance.
        given: The path and the ``Leaf`` of each value in the container. A value that is sent as a
            pickle has None instead of a ``Leaf``.

    Raises:
        TypeError, ValueError: A value in the container cannot be sent or reduced. Every instance
            raises this error.
        CollectiveMismatchError: The leaves of the instances differ.
    """
    variable = call.name or "x"
    kinds = ((variable + path, leaf.kind if leaf else "a pickled object") for path, leaf in given)
    detail = f"{call.detail}, of a {type(x).__name__}"
    communicator.agree(Signature(call.call, detail, name=call.name, leaves=tuple(kinds)))
    for path, leaf in given:
        if leaf and leaf.refusal:
            raise type(leaf.refusal)(f"{call.call}: {variable}{path} is {leaf.refusal}")


def _refused(communicator: Communicator, call: Signature, leaf: Leaf) -> Exception:
    """Return the error for a value that cannot be sent or reduced.

    This function first compares the values of the instances, so that all instances raise an error.

    Raises:
        CollectiveMismatchError: The instances passed different kinds of values.
    """
    assert leaf.refusal is not None
    communicator.agree(replace(call, detail=f"{call.detail}, of {leaf.refusal}"))
    return type(leaf.refusal)(f"{call.call}: {call.name or 'x'} is {leaf.refusal}")


def gather(x: Any, root: int | None, name: str, communicator: Communicator) -> list[Any] | None:
    """Return the values of all instances on instance ``root``, and None on the others.

    If ``root`` is None, every instance gets the values.
    """
    arrays = leaf_arrays()
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
    # If ``rows`` has one dimension, ``list(rows)`` would contain numbers instead of arrays.
    gathered = list(rows) if array.ndim else [row.reshape(()) for row in rows[:, None]]
    return [arrays.tensor_like(x, row) for row in gathered] if arrays.is_tensor(x) else gathered


def copy_of(x: Any) -> Any:
    """Return a copy of an array or a tensor. The copy of a tensor does not have a gradient."""
    return x.detach().clone() if hasattr(x, "detach") else x.copy()
