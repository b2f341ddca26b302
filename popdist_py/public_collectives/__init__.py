"""The public collectives: which arrays their values become, and which calls send these arrays.

Programs import the collectives from ``popdist_py``. Nothing here moves data between instances:
``popdist_py.collectives`` does. May call: activities, collectives, context, value_tree.
"""
