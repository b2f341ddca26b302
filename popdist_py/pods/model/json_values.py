"""Conversion of dataclasses, tuples and enumerations to JSON and back.

A dataclass becomes a JSON object, and a tuple becomes a JSON array. A member of an enumeration
becomes its value, which is a name in V-IPU's protocol. The conversion from JSON checks each field.
The error for an unknown, missing or wrong field names the field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, Final

from popdist_py.pods.model.pod_errors import InvalidRequestError

_MOST_CHARACTERS: Final = 4096
# All JSON parsers and SQLite represent integers up to this limit exactly.
_LARGEST_INTEGER: Final = (1 << 53) - 1


def encode(value: object) -> bytes:
    """Return a value as compact JSON in UTF-8.

    Raises:
        InvalidRequestError: A text is not valid Unicode, or a number is not finite.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except ValueError as error:
        raise InvalidRequestError(f"a value cannot be encoded as JSON: {error}") from None


def decode(body: bytes) -> object:
    """Return the value that a JSON body contains.

    Raises:
        InvalidRequestError: The body is not JSON in UTF-8, nests too deeply, or repeats a field.
    """
    try:
        return json.loads(
            body.decode(), object_pairs_hook=_without_twins, parse_constant=_refuse_constant
        )
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError(
            "the JSON body contains too many levels of nested arrays or objects"
        ) from None
    except ValueError as error:  # not UTF-8, not JSON, or an integer with thousands of digits
        raise InvalidRequestError(
            f"the body of the HTTP message is not JSON in UTF-8: {error}"
        ) from None


def to_json(value: object) -> Any:
    """Convert a value to the types of JSON: dict, list, str, number, bool or None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {name: to_json(each) for name, each in value.items()}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (tuple, list, range)):
        return [to_json(each) for each in value]
    return value


def from_json(kind: Any, value: object, name: str) -> Any:
    """Convert ``value``, which was decoded from JSON, to the type ``kind``.

    A field with a default may be missing. ``name`` is the name of the value for error messages.

    Raises:
        InvalidRequestError: The type of the value is wrong; the message names the field.
    """
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        types_, defaults = _shape(kind)
        return kind(**read_fields(types_, defaults, value, name))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise _wrong(name, value, "an array")
        (each, _) = typing.get_args(kind)
        return tuple(from_json(each, one, f"{name}[{i}]") for i, one in enumerate(value))
    if isinstance(kind, types.UnionType):
        (other,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
        return None if value is None else from_json(other, value, name)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        names = [each.value for each in kind]
        if value not in names:
            raise _wrong(name, value, "one of " + ", ".join(names))
        return kind(value)
    return _plain(kind, value, name)


def _plain(kind: Any, value: object, name: str) -> object:
    """Return ``value`` if its type is ``kind``: a string, a number, a boolean or None."""
    if kind is str:
        return _text(value, name)
    if kind is bool and isinstance(value, bool):
        return value
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if kind is int and is_integer and abs(value) <= _LARGEST_INTEGER:  # type: ignore[arg-type]
        return value
    if kind is float and (is_integer or isinstance(value, float)):
        # Infinity and integers that are too large for a float are refused.
        if abs(value) < 1e300 and math.isfinite(value):  # type: ignore[arg-type]
            return float(value)  # type: ignore[arg-type]
    elif kind is None and value is None:
        return None
    wanted = {bool: "true or false", int: "an integer", float: "a finite number", None: "null"}
    raise _wrong(name, value, wanted[kind])


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "text")
    if len(value) > _MOST_CHARACTERS:
        raise InvalidRequestError(
            f"{name} has {len(value)} characters: expected at most {_MOST_CHARACTERS} characters"
        )
    # A JSON text can contain unpaired surrogates, which files and terminals do not accept.
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise _wrong(name, value, "text without NUL characters and unpaired surrogates")
    return value


def read_fields(
    kinds: Mapping[str, Any], defaults: Mapping[str, object], value: object, name: str
) -> dict[str, Any]:
    """Check the fields of a JSON object and return them. Fields without a default are required."""
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    accepted = ", ".join(kinds) or "none"
    for field in value:
        if field not in kinds:
            raise InvalidRequestError(
                f"{name} has the unknown field {_shown(field)}; the known fields are: {accepted}"
            )
    found = {}
    for field, kind in kinds.items():
        if field in value:
            found[field] = from_json(kind, value[field], f"{name}.{field}")
        elif field in defaults:
            found[field] = defaults[field]
        else:
            raise InvalidRequestError(
                f"the field {name}.{field} is missing; the fields of {name} are: {accepted}"
            )
    return found


@cache
def _shape(kind: type) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the types and the default values of a dataclass's fields."""
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
    return typing.get_type_hints(kind), defaults


def _wrong(name: str, value: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {_shown(value)}: expected {wanted}")


def _shown(value: object) -> str:
    """Return a value as one short line of ASCII, for an error message."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST_INTEGER:
        return "an integer beyond 2^53"
    text = json.dumps(value, default=str)  # TOML has dates
    return text if len(text) <= 80 else f"{text[:77]}..."


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidRequestError(f"the field {_shown(name)} occurs twice in one JSON object")
        found[name] = value
    return found


def _refuse_constant(name: str) -> object:
    raise InvalidRequestError(f"{name} is not a valid number in JSON")
