"""Exclusive devices of a pod for programs that run without the launcher.

No module of this package plans a job, stores a pod, or imports torch or NumPy.
May call: pods, pods.model, device_numbers, errors.
"""
