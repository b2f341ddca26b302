"""Pods of emulated IPUs, whose partitions jobs and programs attach to.

``find_pod`` opens the pod that the user names, as a ``PodStore``. ``folder`` stores a pod on this
machine, and ``server`` calls the server of a pod for several hosts. The launcher and the command
``poprun-py-pod`` use this package. A program without a launcher attaches to devices with
``program_devices``.
No module of this package imports torch or NumPy.
May call: pods.folder, pods.server, pods.model, device_numbers, errors.
"""
