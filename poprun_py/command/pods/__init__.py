"""The commands ``poprun-py-pod``, ``gc-info`` and ``gc-monitor``, and the server of a pod.

popdist_py/pods stores the pods, and decides what a partition may be.
"""
