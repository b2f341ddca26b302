"""What the user types: which instance gets it, and how the user's own terminal is set for it.

Here live the launcher's terminal, its modes, the turns of the debuggers, and Ctrl-Z.
Nothing here decides how a job ends. May call: instance.
"""
