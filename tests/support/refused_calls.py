"""Runs a command that the kernel refuses some system calls, as it does in hardened containers.

``refused_calls.py ptrace,pidfd_getfd COMMAND ...``: they end with EPERM, in the command and in all
that it starts (seccomp; x86-64).
"""

import ctypes
import os
import struct
import sys

_NUMBERS = {
    "ptrace": 101,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "memfd_create": 319,
    "pidfd_open": 434,
    "pidfd_getfd": 438,
    "sched_setaffinity": 203,
    "mbind": 237,
    "set_mempolicy": 238,
}
_LOAD_NUMBER, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE_WITH_EPERM = 0x7FFF0000, 0x00050001
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def main(names: list[str], command: list[str]) -> None:
    """Have the system calls refused, and become the command."""
    steps = [(_LOAD_NUMBER, 0, 0, 0)]
    for name in names:
        steps += [(_IF_EQUAL, 0, 1, _NUMBERS[name]), (_RETURN, 0, 0, _REFUSE_WITH_EPERM)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(
        _SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        sys.exit(f"seccomp: {os.strerror(ctypes.get_errno())}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2:])
