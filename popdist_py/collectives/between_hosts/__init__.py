"""The instances of several hosts: MPI calls with a time-out, and TCP connections.

Here live polled MPI calls, groups over TCP alone, and how their connections are made.
Nothing here knows shared memory. May call: within_host (its host_barrier), collectives, peers,
environment, errors, activities.
"""
