"""A replica back end that records the operations of a forward and a backward pass as a graph.

Later calls of the model run the recorded operations, and not the Python code of the model.
``recording`` records the operations, and ``passes`` simplifies the graph. ``graph_code`` generates
Python code from the graph, and ``graph_replicas`` runs the replicas with this code.
Nothing here chooses a back end.
May call: execution, group_norms, calls, tracing, weights.
"""
