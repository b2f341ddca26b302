"""The server that keeps a pod for several hosts: JSON over HTTP.

Nothing here decides what a partition may be (popdist_py/pods); it hands calls to a store.
May call: pods and atomic_file (of the library), terminal, versions.
"""
