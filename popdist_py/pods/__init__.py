"""Pods of emulated IPUs, which jobs and single programs attach and release.

``find_pod`` opens the pod that the user names and returns it as a ``PodStore``. The package
``folder`` keeps the state of a pod on this machine. The package ``server`` is the client of a pod's
server, through which several hosts can share a pod. The launcher and the command ``poprun-py-pod``
use this package. A program without a launcher uses ``program_devices`` to attach to devices.
No module of this package imports torch or NumPy.
May call: pods.folder, pods.server, pods.model, device_numbers, errors.
"""
