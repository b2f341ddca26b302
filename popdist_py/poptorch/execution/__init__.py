"""Modules that run a compiled model: its replicas, its random numbers and its number formats.

The package contains the loop over the micro-batches of a call, and the replica back ends. A replica
back end is code that runs one micro-batch on each replica of this instance.
No module here reads options; callers pass the values. May call: update, weights, tracing, calls,
group_norms, enums, errors, and the library's timeline.
"""
