"""The mesh between the hosts of a job, over TCP or MPI, and the collective calls over a mesh.

Here lives also the start of MPI.
Nothing here reduces within a host. May call: within_host (its group of a host), collectives,
peers, environment, errors, activities.
"""
