"""The mesh between the hosts of a job, over TCP or MPI, and the collective calls over a mesh.

This package also starts MPI. It does not reduce arrays within a host. It may call within_host (for
the group of a host), collectives, peers, environment, errors and activities.
"""
