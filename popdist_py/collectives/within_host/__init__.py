"""Shared memory, the barrier and the exchange of bytes between the instances of one host.

This package also reads and writes the memory of other processes. It does not connect to other
hosts. It may call collectives, errors and activities.
"""
