"""Pods of emulated IPUs, whose partitions jobs and programs attach to.

``find_pod`` opens the pod that the user names, as a ``PodStore``. ``folder`` stores a pod on this
machine, and ``server`` calls the server of a pod for several hosts. The launcher, the command
``poprun-py-pod`` and programs without a launcher use this package.
No module of it imports torch or NumPy.
May call: pods.folder, pods.server, pods.model, device_numbers, errors.
"""
