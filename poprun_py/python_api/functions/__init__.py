"""Jobs that call a Python function in every instance.

This package contains the files with pickled calls and results, the program that each instance runs
for a call, and the exceptions of instances, which are raised again in the calling program. Other
packages start the jobs and send the pickled calls to other hosts.
"""
