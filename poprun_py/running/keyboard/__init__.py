"""Input for one instance, from the user's terminal or another standard input.

The package also handles terminal modes, debuggers that wait for the keyboard, and Ctrl-Z.
"""
