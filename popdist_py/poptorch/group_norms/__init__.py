"""Batch norms whose mean and variance are computed over the samples of a group of replicas.

The modules contain the batch norm layer, the exchange of statistics within a group, and a
scheduler. The scheduler pauses each replica at a batch norm until all replicas have reached the
same batch norm. No module here uses models, options or replica back ends. May call: errors, and the
library's collectives.
"""
