"""Pods of emulated IPUs, whose partitions jobs and programs attach to.

``find_pod`` opens the pod that the user names, as a ``PodStore``. A pod is stored in a folder of
this machine (``folder``), or a server for several hosts keeps it (``server``). The launcher, the
command ``poprun-py-pod`` and programs without a launcher use this package.
No module of it imports torch or NumPy.
May call: device_numbers, errors.
"""
