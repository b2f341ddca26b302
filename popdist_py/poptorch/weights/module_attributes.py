"""The class ModuleAttributes, which stores the plain attributes that modules have on the device.

A plain attribute of a module is an attribute that is not a parameter, a buffer or a submodule. An
example of a plain attribute is a counter that the forward pass increments. An IPU program runs the
Python code of a forward pass only once, during compilation. In every later call of the model, plain
attributes must have the values from before the first forward pass.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

__all__ = ["ModuleAttributes"]

_MISSING: Final = object()
_CONTAINERS: Final = (list, dict, set, deque, defaultdict)
_TORCH_GROUPS: Final = ("_parameters", "_buffers", "_modules")


class ModuleAttributes:
    """The plain attributes that the modules of a model have on the device.

    Args:
        views: Each module with the ``__dict__`` that replaces the module's own ``__dict__`` during
            a forward pass on the device.
    """

    def __init__(self, views: Sequence[tuple[nn.Module, dict[str, Any]]]) -> None:
        self._views = views
        self._changed: list[tuple[dict[str, Any], str, Any]] = []

    def snapshot(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the plain attributes of every module, with copies of tensor attributes."""
        return [
            (view, {key: _frozen(value) for key, value in view.items() if key not in _TORCH_GROUPS})
            for _, view in self._views
        ]

    def tensors(self) -> list[torch.Tensor]:
        """Return the dense tensors that are plain attributes of modules."""
        return [
            value
            for _, view in self._views
            for value in view.values()
            if isinstance(value, torch.Tensor) and value.layout == torch.strided
        ]

    def record_changes(self, before: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Record which plain attributes of modules the first forward pass changed.

        The method ``restore()`` sets the recorded attributes to their values before the first
        forward pass. An IPU program runs the Python code of a forward pass only once, during
        compilation. Therefore, if the first forward pass sets a plain attribute to a new value that
        is not a tensor, the user's module also gets the new value.

        Args:
            before: The result of ``snapshot()`` before the first forward pass.
        """
        for (module, view), (_, values) in zip(self._views, before, strict=True):
            plain = {key: value for key, value in view.items() if key not in _TORCH_GROUPS}
            for key in plain.keys() | values.keys():
                if _unchanged(values.get(key, _MISSING), plain.get(key, _MISSING)):
                    continue
                self._changed.append((view, key, values.get(key, _MISSING)))
                if key in plain and not isinstance(plain[key], torch.Tensor):
                    module.__dict__[key] = plain[key]

    def restore(self) -> None:
        """Undo the changes of the first forward pass that ``record_changes()`` recorded."""
        for view, key, value in self._changed:
            if value is _MISSING:
                view.pop(key, None)
            else:
                view[key] = value[1].clone() if isinstance(value, tuple) else value

    def changed_values(self) -> list[Any]:
        """Return the current values of the plain attributes that a forward pass changes."""
        return [view.get(key, _MISSING) for view, key, _ in self._changed]

    def put_changed(self, values: Sequence[Any]) -> None:
        """Assign ``values`` to the plain attributes that a forward pass changes.

        Args:
            values: The attribute values that ``changed_values()`` returned.
        """
        for (view, key, _), value in zip(self._changed, values, strict=True):
            if value is _MISSING:
                view.pop(key, None)
            else:
                view[key] = value

    @contextmanager
    def contents_kept(self) -> Iterator[None]:
        """Undo the changes that the ``with`` block makes to lists, dicts and sets in modules."""
        saved = [
            (value, value.copy())
            for _, view in self._views
            for key, value in view.items()
            if key not in _TORCH_GROUPS and type(value) in _CONTAINERS
        ]
        try:
            yield
        finally:
            for container, content in saved:
                container.clear()
                add = container.extend if hasattr(container, "extend") else container.update
                add(content)


def _frozen(value: Any) -> Any:
    """Return (tensor, copy, version counter) for a tensor; return any other value unchanged."""
    if isinstance(value, torch.Tensor):
        return (value, value.detach().clone(), value._version)
    return value


def _unchanged(before: Any, now: Any) -> bool:
    if isinstance(now, torch.Tensor):
        return (
            isinstance(before, tuple)
            and len(before) == 3
            and before[0] is now
            and before[2] == now._version
        )
    return before is now or (
        not isinstance(before, tuple)
        and type(before) is type(now)
        and isinstance(now, int | float | str | bool)
        and before == now
    )
