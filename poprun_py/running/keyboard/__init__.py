"""Input for one instance, from the user's terminal or another standard input.

Contains also the modes of the terminal, the order in which debuggers use it, and Ctrl-Z.
"""
