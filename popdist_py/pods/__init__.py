"""Pods of emulated IPUs. Jobs and programs attach to the partitions of a pod.

``find_pod`` opens the pod that the user names and returns it as a ``PodStore``. The package
``folder`` stores a pod on this machine. The package ``server`` is the client of a pod's server,
which several hosts can use. The launcher and the command ``poprun-py-pod`` use this package. A
program without a launcher uses ``program_devices`` to attach to devices.
No module of this package imports torch or NumPy.
May call: pods.folder, pods.server, pods.model, device_numbers, errors.
"""
