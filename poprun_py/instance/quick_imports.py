"""json, signal and socket for the wrapper, from CPython's own parts below them where they exist.

The public modules import re and enum, which takes longer than everything else that the wrapper does
before the program starts (13 ms of 21). What is offered is what both forms have; the public modules
stand in wherever the parts below are missing or answer differently.
"""

__all__ = ["dumps", "loads", "signal", "socket"]

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
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


def _accelerated() -> "tuple[Callable[[Any], str], Callable[[bytes], Any]]":
    """Return json's encoder and decoder in C, called as ``json.dumps`` and ``json.loads``."""
    import _json

    class Settings:
        strict = True
        object_hook = object_pairs_hook = array_hook = None
        parse_float, parse_int, parse_constant = float, int, float
        memo: dict[str, str] = {}  # noqa: RUF012

    scan = _json.make_scanner(Settings)  # type: ignore[arg-type]  # it reads the attributes only
    text = _json.encode_basestring_ascii
    # No table of containers to find cycles by, and no default for other types: values are plain.
    encode = _json.make_encoder(None, None, text, None, ": ", ", ", False, False, True)  # type: ignore[arg-type]

    def dumps(value: "Any") -> str:
        return "".join(encode(value, 0))

    def loads(data: bytes) -> "Any":
        return scan(str(data, "utf-8"), 0)[0]

    sample = {"a": [1, -2.5, None, True, "\u00fc\n"], "b": {}}
    if loads(dumps(sample).encode()) != sample:
        raise ImportError("these are not the functions that json uses")
    return dumps, loads


try:
    dumps, loads = _accelerated()
except (ImportError, AttributeError, TypeError, ValueError):
    from json import dumps, loads
