"""Batch norms that compute their mean and variance over a group of replicas.

The modules contain the computation of the layer, the exchange of numbers within a group, and a
scheduler that pauses each replica at a batch norm until all replicas have reached it.
No module here uses models, options or replica back ends. May call: errors, and the library's
collectives.
"""
