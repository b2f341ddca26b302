"""The hosts of a job: which they are, how they are reached, and what they say of themselves.

Here live host lists, allocations, remote shells, checks, copying, and the choice of a network.
Nothing here places or starts an instance. May call: hardware, leases, config,
errors; of the library atomic_file, environment.
"""
