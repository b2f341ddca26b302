"""The text that Python's ``print`` shows for options, with one field on each line.

The printed text of options contains the fields that PopTorch prints, and also fields that only this
library has. In the printed text of options, the line of an option that the program changed also
shows the option's default. The function ``fixed_fields`` returns the printed fields of options that
a program cannot change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

__all__ = ["fixed_fields", "options_text"]

_INDENT: Final = "    "


def options_text(options: Any) -> str:
    """Return the printed text of an OptionStore and its groups, like a constructor call."""
    return "\n".join(_lines("", options, inside=False)).removesuffix(",")


def fixed_fields(group: str) -> Mapping[str, Any]:
    """Return the printed fields of a group of options whose values a program cannot change.

    Args:
        group: The name of the class of the group of options.
    """
    if group != "_PrecisionOptions":
        return {}
    # Autocasting is always off, because every operator computes in the type of its inputs.
    return {"autocast_enabled": False, "autocast_policy": None, "autocast_policy_dict": {}}


def _lines(label: str, store: Any, *, inside: bool) -> Iterator[str]:
    """Yield the printed lines of an OptionStore.

    Args:
        label: The text before the class name in the first printed line.
        store: The OptionStore to print.
        inside: Whether the OptionStore is printed as a part of another OptionStore. Only an outer
            OptionStore prints the fields about warnings and about freezing.
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
