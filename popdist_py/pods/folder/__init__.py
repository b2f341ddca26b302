"""Pods that are stored in a folder of this machine, as a SQLite database.

The folder also contains the description ``pod.toml`` and a locked file for each process with
attached IPUs.
May call: pods.model, errors.
"""
