"""What mpirun runs in place of ssh: ssh, with the remote command wrapped in ``sh -c``.

mpirun writes that command for a shell of Bourne's kind. The user's login shell on the other host,
which gets it from sshd, may be another one, such as fish. Started for every host: standard library
only, cheap to import.
"""

import os
import sys

__all__ = ["MARK", "agent_command"]

# Ends the words of ssh; what mpirun adds follows.
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
    # As mpirun has it for ssh: no X11.
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
