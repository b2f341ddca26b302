"""Modules that run a compiled model, with its replicas, random numbers and number formats.

The package contains the loop over the micro-batches of a model's call, and the replica back ends. A
replica back end is code that runs one micro-batch on each replica of this instance (a process of
the job).
No module here reads ``Options`` objects, because callers pass the values of the options.
May call: update, weights, tracing, calls, group_norms, enums, errors, and the library's timeline.
"""
