"""Replicas as a recorded graph: the operations of a forward and a backward pass, without Python.

``recording`` records the operations, ``passes`` simplifies the graph, ``graph_code`` makes Python
code of the graph, and ``graph_replicas`` runs the replicas with this code.
Nothing here chooses a back end. May call: execution, group_norms, calls, tracing.
"""
