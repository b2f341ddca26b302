"""The text that ``print`` shows for options, with one field on each line.

The text contains the fields that PopTorch prints, and this library's own fields. The line of a
changed value also shows the default. A program cannot change the fields in ``fixed_fields``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["fixed_fields", "options_text"]

_INDENT: Final = "    "


def options_text(options: Any) -> str:
    """Return the text of an OptionStore and its groups, in the form of a constructor call."""
    return "\n".join(_lines("", options, inside=False)).removesuffix(",")


def fixed_fields(group: str) -> Mapping[str, Any]:
    """Return the fields of a group whose values cannot be changed.

    Args:
        group: The class name of the group.
    """
    if group != "_PrecisionOptions":
        return {}
    # Autocasting is always off, because every operator computes in the type of its inputs.
    return {"autocast_enabled": False, "autocast_policy": None, "autocast_policy_dict": {}}


def _lines(label: str, store: Any, *, inside: bool) -> Iterator[str]:
    """Yield the lines of a store.

    Args:
        label: The text before the class name in the first line.
        store: The options to print.
        inside: Whether the store is printed as a part of another store. Only the outer store shows
            the lines about warnings and about freezing.
    """
    fields = [*_own_fields(store), *_part_fields(store, inside=inside)]
    if not inside:
        # This library logs warnings immediately, so PopTorch's two fields for warnings are always
        # empty.
        fields += ["_warnings={},", "_warnings_disabled=set(),", f"_is_frozen={store._is_frozen},"]
    opening = f"{label}{type(store).__name__}("
    if not fields:
        yield f"{opening}),"
        return
    yield opening
    yield from (_INDENT + line for line in fields)
    yield "),"


def _own_fields(store: Any) -> Iterator[str]:
    for name, value in fixed_fields(type(store).__name__).items():
        yield f"{name}={value!r},"
    changed, defaults = store.changed(), store._default_values()
    for name, value in store._values.items():
        mark = ""
        if name in changed:
            default = repr(defaults[name]) if name in defaults else "not set"
            mark = f"  # default: {default}"
        yield f"{name}={value!r},{mark}"
    for name in ("_execution_strategy", "_gcd_mappings"):
        if name in store.__dict__:
            yield f"{name}={store.__dict__[name]!r},"


def _part_fields(store: Any, *, inside: bool) -> Iterator[str]:
    for name, group in store._groups().items():
        yield from _lines(f"{name}=", group, inside=True)
    if "_popart" in store.__dict__:
        if inside:
            yield "_popart_options=Options._Popart,"
        else:
            yield from _lines("_popart_options=", store._popart, inside=True)
