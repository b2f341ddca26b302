"""Pods that are stored in a SQLite database, in a folder of this machine.

The folder also contains the pod's description ``pod.toml``, and a locked file for each process with
attached IPUs. No module of this package opens a connection to a server.
May call: pods.model, errors.
"""
