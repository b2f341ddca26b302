"""Keyboard input for one instance, and the modes of the user's terminal.

Contains the terminal and its modes, debuggers that use it in turn, Ctrl-Z, and standard input that
is not a terminal. No module here decides how a job ends.
"""
