"""Horovod's names that belong to no framework, ``horovod.common``: its errors, and small helpers.

Importing this imports no torch. Nothing here communicates. May call: nothing.
"""
