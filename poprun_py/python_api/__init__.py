"""The Python API: ``poprun_py.launch``, ``start`` and JobHandle.

Each job of a Python program has a launcher process of its own, which does what the command does.
This package contains the handles of jobs, that process, and the messages between the two. Planning
and supervision are in other packages.
"""
