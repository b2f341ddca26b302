"""The compiled model at work: device iterations, replicas, random numbers, number formats.

Here are the loop of a call and the replica back ends.
Nothing here reads options: values are handed in. May call: update, weights, tracing,
calls, group_norms, enums, errors, and the library's timeline.
"""
