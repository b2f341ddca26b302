"""Runs a program in which the kernel refuses bindings, as the filters of containers do.

``python forbid_binding.py WHAT PROGRAM ARGS...``: set_mempolicy(2) fails with EPERM for every
policy (``memory``) or for MPOL_BIND only (``bind``), or sched_setaffinity(2) does (``affinity``).
All children inherit the filter.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# The audit architecture that the filter checks first, and the numbers of the system calls.
MACHINES = {
    "x86_64": (0xC000003E, {"set_mempolicy": 238, "sched_setaffinity": 203}),
    "aarch64": (0xC00000B7, {"set_mempolicy": 237, "sched_setaffinity": 122}),
}
_LOAD, _JUMP_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_MPOL_BIND = 2
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2


def forbid(what: str) -> None:
    """Install the filter in this process.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    architecture, numbers = MACHINES[platform.machine()]
    number = numbers["sched_setaffinity" if what == "affinity" else "set_mempolicy"]
    refused_mode = _MPOL_BIND if what == "bind" else None
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 0, 5, architecture),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_EQUAL, 0, 3, number),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_JUMP_EQUAL, 0, 1 if refused_mode is not None else 0, refused_mode or 0),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, description, 0, 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    forbid(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
