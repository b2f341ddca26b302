"""The public collectives, and the conversion of their values into arrays.

Programs import the collectives from ``popdist_py``. Nothing here moves data between instances,
because ``popdist_py.collectives`` does. May call: activities, collectives, context, value_tree.
"""
