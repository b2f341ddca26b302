"""Runs a command to which the kernel refuses some system calls, as it does in hardened containers.

``refused_calls.py ptrace,pidfd_getfd COMMAND ...``: they end with EPERM, in the command and in all
that it starts (seccomp). ``set_mempolicy=2`` refuses a call only with that first argument.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# The architecture that the filter checks first, and the numbers of system calls.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        {
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
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "ptrace": 117,
            "process_vm_readv": 270,
            "process_vm_writev": 271,
            "kcmp": 272,
            "memfd_create": 279,
            "pidfd_open": 434,
            "pidfd_getfd": 438,
            "sched_setaffinity": 122,
            "mbind": 235,
            "set_mempolicy": 237,
        },
    ),
}
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def main(calls: list[str], command: list[str]) -> None:
    """Have the system calls refused, and become the command."""
    architecture, numbers = _MACHINES[platform.machine()]
    # A jump skips as many steps if equal, else as the second number says.
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for call in calls:
        name, _, argument = call.partition("=")
        steps += [(_LOAD, 0, 0, _NUMBER), (_IF_EQUAL, 0, 3 if argument else 1, numbers[name])]
        if argument:
            steps += [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_IF_EQUAL, 0, 1, int(argument))]
        steps.append((_RETURN, 0, 0, _REFUSE))
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
