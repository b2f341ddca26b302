"""The program that mpirun runs in place of ssh, to wrap the remote command in ``sh -c``.

mpirun writes the remote command for a Bourne shell, but sshd on the remote host passes the command
to the user's login shell, which may be fish. This program imports only os and sys to start fast,
because mpirun starts this program once for every host.
"""

import os
import sys

# This word separates ssh and its own arguments from the arguments that mpirun adds.
MARK = "--"
# If the user's login shell is a C shell, Open MPI 4 writes a remote command with this text.
_C_SHELL_TEXT = "set path = ("


def ssh_command(words: list[str]) -> list[str]:
    """Return the ssh command to run for the arguments of this program.

    Args:
        words: The command ssh with its own arguments, then ``MARK``, then the arguments that mpirun
            adds (options, the host, and the remote command).
    """
    end = words.index(MARK)
    ssh, rest = words[:end], words[end + 1 :]
    position = 0
    while position < len(rest) and rest[position].startswith("-"):
        position += 2 if rest[position] == "-l" else 1
    before, command = rest[: position + 1], " ".join(rest[position + 1 :])
    if _C_SHELL_TEXT not in command:
        command = f"sh -c {quoted(command)}"
    # This program adds -x (no X11 forwarding), because mpirun adds -x only to a command named ssh.
    return [*ssh, "-x", *before, command]


def quoted(text: str) -> str:
    """Quote ``text`` so that any login shell reads it as one word."""
    # shlex.quote is not used, because importing shlex would take as long as starting Python.
    return "'" + text.replace("'", "'\"'\"'") + "'"


if __name__ == "__main__":
    program = ssh_command(sys.argv[1:])
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"poprun-py: cannot run {program[0]}: {error.strerror}")
