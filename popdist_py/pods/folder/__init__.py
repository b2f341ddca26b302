"""Pods that are stored on this machine, each in a folder with a SQLite database.

The folder of a pod also contains its description ``pod.toml``, and one locked file for each process
that holds IPUs. No module of this package opens a connection to a server.
May call: pods.model, errors.
"""
