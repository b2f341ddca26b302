"""What goes into a call of a wrapped model and comes out of it.

Here live nested values, default arguments, custom types, the sizes of batches, and host-device
transfer.
Nothing here knows options, models or replicas. May call: enums, logger, errors,
and the library's popart.
"""
