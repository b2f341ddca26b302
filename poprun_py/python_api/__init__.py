"""``poprun_py.launch`` and ``start``: jobs of a Python program, and their handles.

Each job has a launcher process of its own. Contains the handle, that process, and the channel
between them. No module here plans or supervises: the process launches as the command does.
"""
