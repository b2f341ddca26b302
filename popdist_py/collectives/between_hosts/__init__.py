"""The connections between the hosts of a job, over TCP or MPI, and collective calls over them.

A mesh connects one instance of each host with all the others. This package also starts MPI.
No module of this package reduces arrays within a host.
May call: within_host (for the group of a host), collectives, peers, environment, errors,
activities.
"""
