"""What the user types: which instance gets it, and how the user's own terminal is set for it.

Here live the launcher's terminal, its modes, the turns of the debuggers, Ctrl-Z, and standard input
that is not a terminal.
Nothing here decides how a job ends. May call: instance.
"""
