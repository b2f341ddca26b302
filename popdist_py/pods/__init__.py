"""Pods of emulated IPUs: their parts, the rules for partitions, and the processes that hold IPUs.

The launcher, the commands and programs without a launcher use it. A ``PodStore`` stores a pod in a
folder of this machine, or in a server for several hosts.
Nothing here imports torch or NumPy, plans a job, or prints.
May call: device_numbers, errors.
"""
