"""The instances of one host: the memory they share, and how they meet in it.

Here live the shared window, arrival counters, and reading another process's memory.
Nothing here reaches another host. May call: the arithmetic, the tree and the signature.
"""
