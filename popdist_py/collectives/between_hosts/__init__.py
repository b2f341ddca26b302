"""The mesh between the hosts of a job, over TCP or MPI, and the collective calls over a mesh.

This package also starts MPI. No module of this package reduces arrays within a host.
May call: within_host (for the group of a host), collectives, peers, environment, errors,
activities.
"""
