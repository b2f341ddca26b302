"""A replica back end that records the operations of a forward and a backward pass as a graph.

Later calls of the model run the recorded operations, and not the Python code of the model. The
module ``recording`` records the operations, and ``passes`` simplifies the graph. The module
``graph_code`` generates Python code from the graph, and ``graph_replicas`` runs the replicas with
the generated code.
Nothing here chooses the replica back end of a model.
May call: execution, group_norms, calls, tracing, weights.
"""
