"""The instances of one host: the memory they share, and the barrier in it.

Here live the shared window, the barrier, and reading another process's memory.
Nothing here reaches another host. May call: collectives, errors,
activities.
"""
