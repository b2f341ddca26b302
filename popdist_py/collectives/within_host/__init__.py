"""Data exchange between the instances of one host: shared memory, a barrier and direct reads.

A direct read or write accesses the memory of another process. No module of this package connects to
other hosts.
May call: collectives, errors, activities.
"""
