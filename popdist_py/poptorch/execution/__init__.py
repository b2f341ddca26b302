"""The compiled model at work: device iterations, replicas, random numbers, number formats.

Here live the loop of a call, the replica back ends, and what they need of a trace.
Nothing here reads options: values are handed in. May call: update, weights,
calls, group_norms, forward_phase, enums, errors, and the library's timeline.
"""
