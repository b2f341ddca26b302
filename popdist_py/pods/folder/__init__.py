"""Pods that are stored in a folder of this machine, in a SQLite database.

The folder also contains the description ``pod.toml`` and a locked file for each process with
attached IPUs. No module of this package opens a connection to a server.
May call: pods.model, errors.
"""
