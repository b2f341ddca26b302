"""json, signal and socket without their slow imports, from the C modules below them.

The public modules import re and enum, which takes 13 of the 21 ms that the wrapper needs before the
program starts. This module offers only names that behave the same in both forms. If a C module is
missing or gives other results, the public module is used.
"""

__all__ = ["dumps", "loads", "signal", "socket"]

TYPE_CHECKING = False  # not imported from typing, which takes long to import
if TYPE_CHECKING:
    import _socket as socket
    import signal
    from collections.abc import Callable
    from typing import Any
else:
    try:
        import _signal as signal
        import _socket as socket
    except ImportError:
        import signal
        import socket


def _c_functions() -> "tuple[Callable[[Any], str], Callable[[bytes], Any]]":
    """Return ``dumps`` and ``loads`` made of the C encoder and decoder of json.

    Raises:
        ImportError, AttributeError, TypeError, ValueError: This Python has other C functions.
    """
    import _json

    class Settings:
        strict = True
        object_hook = object_pairs_hook = array_hook = None
        parse_float, parse_int, parse_constant = float, int, float
        memo: dict[str, str] = {}  # noqa: RUF012

    scan = _json.make_scanner(Settings)  # type: ignore[arg-type]  # it reads the attributes only
    text = _json.encode_basestring_ascii
    # Without a search for cycles and without a function for other types: messages have neither.
    encode = _json.make_encoder(None, None, text, None, ": ", ", ", False, False, True)  # type: ignore[arg-type]

    def dumps(value: "Any") -> str:
        return "".join(encode(value, 0))

    def loads(data: bytes) -> "Any":
        return scan(str(data, "utf-8"), 0)[0]

    sample = {"a": [1, -2.5, None, True, "\u00fc\n"], "b": {}}
    if loads(dumps(sample).encode()) != sample:
        raise ImportError("the C functions of json have changed")
    return dumps, loads


try:
    dumps, loads = _c_functions()
except (ImportError, AttributeError, TypeError, ValueError):
    from json import dumps, loads
