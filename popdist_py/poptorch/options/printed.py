"""Text of options for ``print``: grouped, one field a line, with the default of changed values.

The fields are those that PopTorch prints, and this library's own. This module has the values of a
few fields of PopTorch that cannot be changed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["fixed_fields", "options_text"]

_INDENT: Final = "    "


def options_text(options: Any) -> str:
    """Return the fields of an OptionStore and its groups, one a line, in the form of a call."""
    return "\n".join(_lines("", options, inside=False)).removesuffix(",")


def fixed_fields(group: str) -> Mapping[str, Any]:
    """Return PopTorch's fields that cannot be changed here, for the class name of a group."""
    if group != "_PrecisionOptions":
        return {}
    # Every operator computes in the type of its inputs.
    return {"autocast_enabled": False, "autocast_policy": None, "autocast_policy_dict": {}}


def _lines(label: str, store: Any, *, inside: bool) -> Iterator[str]:
    """Yield the lines of a store; a store ``inside`` another leaves out the fields of both."""
    fields = [*_own_fields(store), *_part_fields(store, inside=inside)]
    if not inside:
        # Warnings are logged at once, so these two fields of PopTorch are always empty.
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
