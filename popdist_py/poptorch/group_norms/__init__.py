"""Batch norms whose statistics are those of groups of replicas.

Here live the layer's computation, what the replicas of a group tell one another, and how replicas
that run one after the other wait for it.
Nothing here knows models, options or back ends. May call: errors, and the library's
collectives.
"""
