"""The server that shares a pod between hosts: JSON over HTTP.

It passes calls on to a store, and decides nothing about partitions.
"""
