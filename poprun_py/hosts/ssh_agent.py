"""The program that mpirun runs in place of ssh. It runs ssh with the command in ``sh -c``.

mpirun writes that command for a shell of Bourne's kind. The user's login shell on the other host,
which gets it from sshd, may be another one, such as fish. mpirun starts this program for every
host, so it imports only os and sys.
"""

import os
import sys

__all__ = ["MARK", "agent_command"]

# Separates the words of ssh from the words that mpirun adds.
MARK = "--"
# Open MPI 4 writes this where the login shell on this machine is one of C shell's kind.
_OF_C_SHELL = "set path = ("


def agent_command(words: list[str]) -> list[str]:
    """Return the command that takes the place of ``words``: ssh's, the mark, and mpirun's.

    mpirun's are perhaps options, the host, and the words that ssh joins with blanks.
    """
    end = words.index(MARK)
    ssh, rest = words[:end], words[end + 1 :]
    position = 0
    while position < len(rest) and rest[position].startswith("-"):
        position += 2 if rest[position] == "-l" else 1
    before, command = rest[: position + 1], " ".join(rest[position + 1 :])
    if _OF_C_SHELL not in command:
        command = f"sh -c {quoted(command)}"
    # mpirun adds -x (no X11) for an agent that is named ssh, and not for this one.
    return [*ssh, "-x", *before, command]


def quoted(text: str) -> str:
    """Return one word for any login shell."""
    # The module shlex takes as long to import as Python takes to start.
    return "'" + text.replace("'", "'\"'\"'") + "'"


if __name__ == "__main__":
    program = agent_command(sys.argv[1:])
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"poprun-py: cannot run {program[0]}: {error.strerror}")
