"""Functions of json, signal, socket and ctypes, imported quickly from the C modules below them.

The public modules import re, enum and struct, which takes 15 of the 24 ms that the wrapper needs
before the program starts. This module offers only functions that behave in the same way in the
public module and in the C module. If a C module is missing or gives other results, the public
module is used.
"""

__all__ = ["dumps", "load_prctl", "loads", "signal", "socket"]

TYPE_CHECKING = False  # importing TYPE_CHECKING from typing would take long
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

    If the C functions of this Python version differ, one of several exceptions is raised.
    """
    import _json

    class Settings:
        strict = True
        object_hook = object_pairs_hook = array_hook = None
        parse_float, parse_int, parse_constant = float, int, float
        memo: dict[str, str] = {}  # noqa: RUF012

    scan = _json.make_scanner(Settings)  # type: ignore[arg-type]  # it only reads attributes
    text = _json.encode_basestring_ascii
    # The encoder neither searches for cycles nor converts other types, because messages contain
    # neither.
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


def load_prctl() -> "tuple[Callable[..., int], type, Callable[[Any], object]]":
    """Return the C function prctl, and the type and the reference function for its results.

    Returns:
        The function ``prctl``, which takes an option and four further arguments; the type ``c_int``
        of a number that prctl writes; and the function ``byref``, which returns a reference to the
        number as an argument for prctl.
    """
    try:
        return _quick_prctl()
    except (ImportError, AttributeError, TypeError, OSError):
        import ctypes

        return ctypes.CDLL(None).prctl, ctypes.c_int, ctypes.byref


def _quick_prctl() -> "tuple[Callable[..., int], type, Callable[[Any], object]]":
    """Do the work of ``load_prctl`` without the public module ctypes.

    If the C module of this Python version differs, one of several exceptions is raised.
    """
    import _ctypes
    import os

    class Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "i"

    class Function(_ctypes.CFuncPtr):
        _flags_ = _ctypes.FUNCFLAG_CDECL
        _restype_ = Int

    process = _ctypes.dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type]  # typeshed lacks None
    address = _ctypes.dlsym(process, "prctl")
    return Function(address), Int, _ctypes.byref
