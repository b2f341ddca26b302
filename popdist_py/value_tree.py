"""Nested values: the leaves of dicts, lists, tuples and dataclasses, in an order that all share.

Nothing here knows what a leaf is, nor what becomes of it. Standard library only.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

__all__ = ["is_container", "leaves", "rebuilt"]

_CONTAINERS = (dict, list, tuple)
# As dataclasses.is_dataclass() looks for it; the class of a class does not have it.
_DATACLASS_MARK = "__dataclass_fields__"


def is_container(x: Any) -> bool:
    """Tell whether ``x`` is taken apart: a dict, list, tuple or dataclass."""
    return isinstance(x, _CONTAINERS) or hasattr(type(x), _DATACLASS_MARK)


def leaves(x: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return path and value of every leaf, such as ``['loss'][0]``.

    Keys come sorted by their text: their order in a dict may differ between instances.

    Raises:
        ValueError: a container contains itself.
    """
    if not is_container(x):
        return [(path, x)]
    found: list[tuple[str, Any]] = []
    # The containers around the next item, outermost first. A list instead of recursion allows
    # any depth: Python limits recursion to about a thousand levels.
    around = [(path, x, iter(_items(x)))]
    ids = {id(x)}
    while around:
        path, container, items = around[-1]
        for step, item in items:
            if not is_container(item):
                found.append((path + step, item))
                continue
            if id(item) in ids:
                raise ValueError(f"a container that contains itself, at {path + step}")
            ids.add(id(item))
            around.append((path + step, item, iter(_items(item))))
            break
        else:
            around.pop()
            ids.remove(id(container))
    return found


def rebuilt(x: Any, values: Iterator[Any]) -> Any:
    """Return a container like ``x``, whose leaves are ``values``, in the order of ``leaves``."""
    if not is_container(x):
        return next(values)
    around: list[tuple[Any, Iterator[tuple[str, Any]], list[Any]]] = [(x, iter(_items(x)), [])]
    while True:
        container, items, done = around[-1]
        for _, item in items:
            if is_container(item):
                around.append((item, iter(_items(item)), []))
                break
            done.append(next(values))
        else:
            around.pop()
            result = _container_like(container, done)
            if not around:
                return result
            around[-1][2].append(result)


def _container_like(x: Any, items: list[Any]) -> Any:
    """Return a container like ``x`` with other items, in the order of ``_items``."""
    if isinstance(x, dict):
        # A copy keeps the order of keys, and what a subclass knows.
        result = x.copy() if type(x) is dict else copy.copy(x)
        # One by one: update() of a Counter counts, and that of other subclasses may refuse.
        for key, item in zip(_sorted_keys(x), items, strict=True):
            result[key] = item
        return result
    if isinstance(x, list | tuple):
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    result = copy.copy(x)
    for field, item in zip(dataclasses.fields(x), items, strict=True):
        object.__setattr__(result, field.name, item)  # also where the class is frozen
    return result


def _items(x: Any) -> list[tuple[str, Any]]:
    if isinstance(x, dict):
        return [(f"[{key!r}]", x[key]) for key in _sorted_keys(x)]
    if isinstance(x, list | tuple):
        names = getattr(x, "_fields", None)
        steps = [f".{name}" for name in names] if names else [f"[{i}]" for i in range(len(x))]
        return list(zip(steps, x, strict=True))
    return [(f".{field.name}", getattr(x, field.name)) for field in dataclasses.fields(x)]


def _sorted_keys(x: dict[Any, Any]) -> list[Any]:
    if all(type(key) is str for key in x):
        return sorted(x)
    return sorted(x, key=lambda key: (str(key), type(key).__name__))
