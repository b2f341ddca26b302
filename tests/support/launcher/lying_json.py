"""JSON that others may write: every value another one, and texts that readers of JSON trip over."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

__all__ = ["lying_texts", "lying_values"]

# In place of a value, as Python and JSON spell it.
_JUNK = (
    None, True, -1, 0, 1.5, 10**400, 2**63, 1e308, float("nan"), float("-inf"), "", "x", "\0",
    "\ud800", "a\nb", "1e999", [], {}, [None], [[]], {"": None}, ["x", {"y": "\udcff"}],
)  # fmt: skip
_DEEP = 100_000


def lying_values(document: Any, *, every: int = 1, junk: tuple[Any, ...] = _JUNK) -> Iterator[Any]:
    """Yield a document with one part of it another one, or gone; with ``every``, so many-th."""
    places = list(_places(document))
    for number in range(0, len(places) * (len(junk) + 1), every):
        place, which = divmod(number, len(junk) + 1)
        changed = copy.deepcopy(document)
        inner = changed
        for key in places[place][:-1]:
            inner = inner[key]
        if which == len(junk):
            del inner[places[place][-1]]
        else:
            inner[places[place][-1]] = copy.deepcopy(junk[which])
        yield changed


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where values are: each key, and of a list the first and the last."""
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = [(at, value[at]) for at in sorted({0, len(value) - 1}) if value]
    else:
        return
    for key, each in inner:
        yield (*path, key)
        yield from _places(each, (*path, key))


def lying_texts(document: Any) -> Iterator[tuple[str, bytes]]:
    """Yield what is no such document, or hardly JSON, and in words how."""
    text = json.dumps(document)
    data = text.encode()
    yield from {
        "nothing": b"",
        "blank": b" \n",
        "nul": b"\0" * 100,
        "no UTF-8": data[:1] + b"\xff\xfe" + data[1:],
        "UTF-16": text.encode("utf-16"),
        "half": data[: len(data) // 2],
        "two": data + data,
        "deep lists": b"[" * _DEEP,
        "deep lists that end": b"[" * _DEEP + b"]" * _DEEP,
        "deep objects": b'{"a":' * _DEEP,
        "deep inside": data[:-1] + b', "more": ' + b"[" * _DEEP + b"]" * _DEEP + b"}",
        "a long number": b"9" * 10_000,
        "a long number inside": data[:-1] + b', "more": ' + b"9" * 10_000 + b"}",
        "NaN": b"NaN",
        "a name twice": data[:-1] + b', "a": 1, "a": 2}',
        "each name twice": data[:-1] + b", " + data[1:],
        "half a surrogate": data[:-1] + b', "\\ud800": "\\udcff"}',
        "a list": b"[]",
        "a text": b'"x"',
        "null": b"null",
        "a pickle": b"\x80\x04cos\nsystem\n(S'touch pickle-was-read'\ntR.",
        "a page": b"<!doctype html>",
    }.items()
