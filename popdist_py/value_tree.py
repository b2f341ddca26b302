"""Functions that flatten nested dicts, lists, tuples and dataclasses to leaves, and rebuild them.

The order of the leaves is equal on all instances. Every value that is not a container is a leaf.
This module imports only the standard library.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

_CONTAINERS = (dict, list, tuple)
# The attribute that dataclasses.is_dataclass() looks for. This module looks for the attribute in
# the type of a value. An instance of a dataclass is therefore a container, and the dataclass itself
# is a leaf.
_DATACLASS_MARK = "__dataclass_fields__"


def is_container(x: Any) -> bool:
    """Tell whether ``x`` is a dict, a list, a tuple or an instance of a dataclass."""
    return isinstance(x, _CONTAINERS) or hasattr(type(x), _DATACLASS_MARK)


def leaves(x: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the path and the value of every leaf. A path is a text such as ``['loss'][0]``.

    The keys of a dict are sorted by their texts, because their order may differ between instances.

    Raises:
        ValueError: A container contains itself.
    """
    if not is_container(x):
        return [(path, x)]
    found: list[tuple[str, Any]] = []
    # The containers around the next item, outermost first. This list replaces recursion, which
    # Python limits to about a thousand levels.
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
    """Return a container like ``x`` with ``values`` as its leaves, in the order of ``leaves``."""
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
    """Return a container like ``x`` that contains ``items`` instead of the items of ``x``.

    The order of ``items`` is the order in which ``_items(x)`` returns the items of ``x``.
    """
    if isinstance(x, dict):
        # A copy keeps the order of the keys, and the attributes of a subclass.
        result = x.copy() if type(x) is dict else copy.copy(x)
        # Items are set one by one, because update() of a Counter adds counts, and update() of other
        # subclasses may fail.
        for key, item in zip(_sorted_keys(x), items, strict=True):
            result[key] = item
        return result
    if isinstance(x, list | tuple):
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    result = copy.copy(x)
    for field, item in zip(dataclasses.fields(x), items, strict=True):
        object.__setattr__(result, field.name, item)  # this also sets fields of frozen dataclasses
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
