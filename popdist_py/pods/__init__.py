"""Pods of emulated IPUs: their parts, the rules of partitions, and who holds which IPUs.

The launcher, the commands and programs that no launcher started share it. A pod is kept by a
``PodStore``: a database in a folder of this machine, or a server for several hosts.
Nothing here imports torch or NumPy, plans a job, or prints.
May call: device_numbers, errors.
"""
