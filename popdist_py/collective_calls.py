"""The public collectives: arrays, tensors, scalars and containers of them, over a Communicator.

NumPy is imported on use. A torch tensor is passed on as the array that shares its memory, so that
torch is never imported from here. No data move here: that is ``popdist_py.collectives``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from popdist_py.collectives import ReduceOp
from popdist_py.collectives.signature import Signature

__all__ = [
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "synchronize",
]

_OPERATIONS = frozenset(get_args(ReduceOp))


def all_reduce(
    x: Any, op: ReduceOp = "sum", name: str | None = None, *, async_op: bool = False
) -> Any:
    """Reduce ``x`` element by element over all instances and return it.

    float16 and bfloat16 are added up in float32. For booleans ``sum`` and ``max`` mean "any",
    ``prod`` and ``min`` "all"; Python's True and False are counted as 1 and 0.

    Args:
        x: NumPy array or torch tensor (reduced in place), number, or dict, list or tuple of them.
        op: ``sum``, ``mean``, ``max``, ``min`` or ``prod``.
        name: compared between the instances, and shown in messages.
        async_op: return a Handle at once. Its ``wait()`` returns the result; nobody may touch ``x``
            before that.

    Raises:
        ValueError: an unknown ``op``.
        TypeError: ``x`` holds something that cannot be reduced, or a mean of integers.
        CollectiveMismatchError: the instances differ in shape, dtype, op or name.
        InstanceLostError: another instance ended, or did not arrive in time.
    """
    if op not in _OPERATIONS:
        raise ValueError(f"all_reduce(op={op!r}): expected one of {', '.join(get_args(ReduceOp))}")
    communicator = _communicator()

    def collective(array: Any, leaf_name: str) -> None:
        communicator.all_reduce(array, op, leaf_name)

    call = partial(_apply, x, collective, communicator, "all_reduce", name or "")
    return communicator.background.submit(call) if async_op else call()


def broadcast(x: Any, root: int = 0, name: str | None = None, *, async_op: bool = False) -> Any:
    """Return the ``x`` of instance ``root`` on all instances; arrays and tensors in place.

    Args:
        x: as for ``all_reduce``; of equal shape, dtype and structure on all instances.
        root: index of the instance whose ``x`` is sent.
        name: shown in messages.
        async_op: return a Handle at once; its ``wait()`` returns ``x``.

    Raises:
        ValueError: there is no instance ``root``.
        CollectiveMismatchError: the instances differ in shape, dtype or root.
        InstanceLostError: another instance ended, or did not arrive in time.
    """
    communicator = _communicator()
    if root not in communicator.instances:
        raise ValueError(
            f"broadcast(root={root!r}): expected one of the instances "
            f"{list(communicator.instances)}"
        )

    def collective(array: Any, _: str) -> None:
        communicator.broadcast(array, root)

    call = partial(_apply, x, collective, communicator, "broadcast", name or "")
    return communicator.background.submit(call) if async_op else call()


def all_gather(x: Any, name: str | None = None, *, async_op: bool = False) -> Any:
    """Return the ``x`` of every instance as a list, in instance order.

    Args:
        x: NumPy array or torch tensor of equal shape and dtype on all instances, or anything that
            can be pickled.
        name: compared between the instances, and shown in messages.
        async_op: return a Handle at once, whose ``wait()`` returns the list.

    Raises:
        CollectiveMismatchError: the instances differ in shape, dtype or name.
        InstanceLostError: another instance ended, or did not arrive in time.
    """
    communicator = _communicator()
    call = partial(_gather, x, communicator, name or "")
    return communicator.background.submit(call) if async_op else call()


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
    communicator = _communicator()
    num_instances = communicator.num_instances
    if not getattr(x, "shape", ()) or x.shape[0] % num_instances:
        raise ValueError(
            "reduce_scatter: expected an array whose first dimension is a multiple of "
            f"{num_instances}, the number of instances; got {_describe(x)}"
        )
    reduced = x.detach().clone() if _is_tensor(x) else x.copy()
    rows = x.shape[0] // num_instances
    first = communicator.instance_index * rows

    def call() -> Any:
        return all_reduce(reduced, op, name)[first : first + rows]

    return communicator.background.submit(call) if async_op else call()


def barrier() -> None:
    """Return once every instance has called this."""
    _communicator().barrier()


def synchronize() -> None:
    """Wait for all instances (PopDist's name for ``barrier``)."""
    barrier()


def _communicator() -> Any:
    from popdist_py import context

    return context.communicator()


def _is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _describe(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"shape {tuple(shape)}"


def _apply(
    x: Any, collective: Callable[[Any, str], None], communicator: Any, call: str, name: str
) -> Any:
    """Apply ``collective`` to every leaf of ``x``: in place for arrays and tensors."""
    import numpy as np

    if isinstance(x, np.ndarray):
        if call == "all_reduce" and not x.flags.writeable:
            raise ValueError(f"{call}({name}): the array is read-only: give a copy of it")
        return _apply_to_array(x, collective, name)
    if isinstance(x, dict | list | tuple):
        # If containers differ, some instances would wait for leaves that others do not have.
        contents = repr(sorted(map(str, x))) if isinstance(x, dict) else f"{len(x)} items"
        communicator.agree(Signature(call, f"{type(x).__name__} of {contents}", name=name))
        return _apply_to_items(x, collective, communicator, call, name)
    if _is_tensor(x):
        return _apply_to_tensor(x, collective, call, name)
    if isinstance(x, bool | int | float | np.generic):
        array = np.array([int(x) if isinstance(x, bool) else x])
        collective(array, name)
        return array[0] if isinstance(x, np.generic) else array[0].item()
    raise TypeError(
        f"{call}({name}): cannot communicate a {type(x).__name__}: expected an array, a tensor, "
        "a number, or a dict, list or tuple of them"
    )


def _apply_to_items(
    x: Any, collective: Callable[[Any, str], None], communicator: Any, call: str, name: str
) -> Any:
    if isinstance(x, dict):
        # The order of keys may differ between instances: sorted keys pair the leaves.
        results = {
            key: _apply(x[key], collective, communicator, call, f"{name}[{key!r}]")
            for key in sorted(x, key=str)
        }
        return {key: results[key] for key in x}
    items = [
        _apply(item, collective, communicator, call, f"{name}[{index}]")
        for index, item in enumerate(x)
    ]
    return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)


def _apply_to_array(x: Any, collective: Callable[[Any, str], None], name: str) -> Any:
    if x.flags.c_contiguous:
        collective(x, name)
    else:
        contiguous = x.copy(order="C")
        collective(contiguous, name)
        x[...] = contiguous
    return x


def _apply_to_tensor(x: Any, collective: Callable[[Any, str], None], call: str, name: str) -> Any:
    detached = x.detach()
    try:
        contiguous = detached.cpu().contiguous()
        array = _as_array(contiguous)
    except (RuntimeError, TypeError):
        raise TypeError(
            f"{call}({name}): cannot communicate a tensor of {x.dtype}, {x.layout} on {x.device}: "
            "expected a dense one of booleans, integers, or floats of 16 bits or more"
        ) from None
    is_copy = contiguous.data_ptr() != detached.data_ptr()
    sizes_and_strides = zip(detached.shape, detached.stride(), strict=True)
    if is_copy and any(size > 1 and not stride for size, stride in sizes_and_strides):
        raise ValueError(
            f"{call}({name}): elements of the tensor share memory, as after expand(): "
            "give a clone()"
        )
    collective(array, name)
    if is_copy:
        detached.copy_(contiguous)
    return x


def _as_array(tensor: Any) -> Any:
    """Return the array that shares the memory of a contiguous tensor."""
    torch = sys.modules["torch"]
    if tensor.dtype == torch.bfloat16:
        from popdist_py.collectives.arithmetic import BFLOAT16

        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def _gather(x: Any, communicator: Any, name: str) -> list[Any]:
    import numpy as np

    if isinstance(x, np.ndarray) and not x.dtype.hasobject:
        rows = communicator.all_gather(np.ascontiguousarray(x), name)
        return [np.asarray(row).reshape(x.shape) for row in rows]
    if _is_tensor(x):
        torch = sys.modules["torch"]
        rows = communicator.all_gather(_as_array(x.detach().cpu().contiguous()), name)
        rows = [np.asarray(row) for row in rows]  # a row without dimensions is a NumPy scalar
        if x.dtype == torch.bfloat16:
            return [torch.from_numpy(row.view(np.int16)).view(torch.bfloat16) for row in rows]
        return [torch.from_numpy(row) for row in rows]
    return communicator.all_gather_object(x)  # type: ignore[no-any-return]
