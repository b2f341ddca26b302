"""json, signal and socket for the wrapper, from CPython's own parts below them where they exist.

The public modules import re and enum, which takes longer than everything else that the wrapper does
before the program starts (13 ms of 21). What is offered is what both forms have; the public modules
stand in wherever the parts below are missing or answer differently.
"""

__all__ = ["dumps", "loads", "signal", "socket"]

try:
    import _signal as signal
    import _socket as socket
except ImportError:
    import signal
    import socket


def _accelerated():
    """Return json's encoder and decoder in C, called as ``json.dumps`` and ``json.loads``."""
    import _json

    class Settings:
        strict = True
        object_hook = object_pairs_hook = None
        parse_float, parse_int, parse_constant = float, int, float
        memo = {}  # noqa: RUF012

    scan = _json.make_scanner(Settings)
    text = _json.encode_basestring_ascii
    encode = _json.make_encoder(None, None, text, None, ": ", ", ", False, False, True)

    def dumps(value):
        return "".join(encode(value, 0))

    def loads(data):
        return scan(str(data, "utf-8"), 0)[0]

    sample = {"a": [1, -2.5, None, True, "\u00fc\n"], "b": {}}
    if loads(dumps(sample).encode()) != sample:
        raise ImportError("these are not the functions that json uses")
    return dumps, loads


try:
    dumps, loads = _accelerated()
except (ImportError, AttributeError, TypeError, ValueError):
    from json import dumps, loads
