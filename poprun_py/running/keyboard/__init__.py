"""Input for one instance, from the user's terminal or another standard input.

The package also handles the modes of the terminal, debuggers that wait for it, and Ctrl-Z.
"""
