"""Jobs that call a Python function in every instance.

Contains the files with pickled calls and results, the program that each instance runs for a call,
and the exceptions of instances, which are raised again in the calling program. Starting jobs and
sending files to hosts are in other packages.
"""
