"""The commands ``poprun-py-pod``, ``gc-info`` and ``gc-monitor``, and the server of a pod.

The package popdist_py/pods stores the pods and decides which partitions are allowed.
"""
