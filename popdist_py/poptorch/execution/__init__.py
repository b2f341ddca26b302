"""Modules that run a compiled model, with its replicas, random numbers and number formats.

The package contains the loop over the micro-batches of a call, and the replica back ends. A replica
back end runs one micro-batch on each local replica.
No module here reads options; callers pass the values. May call: update, weights, tracing,
calls, group_norms, enums, errors, and the library's timeline.
"""
