"""The Python API: ``poprun_py.launch``, ``start`` and JobHandle.

Each job that a Python program starts has its own launcher process, which works like the command
``poprun-py``. This package contains the job handles, the program of the launcher process, and its
messages to the Python program. Other packages plan jobs and supervise them.
"""
