"""Shared memory, the barrier and the exchange of bytes between the instances of one host.

This package also reads and writes the memory of other processes. No module of this package connects
to other hosts.
May call: collectives, errors, activities.
"""
