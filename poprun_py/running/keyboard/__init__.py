"""What the user types: which instance gets it, and how the user's own terminal is set for it.

This package handles the launcher's terminal and its modes, debuggers that use it in turn, Ctrl-Z,
and standard input that is not a terminal.
Nothing here decides how a job ends. May call: instance.
"""
