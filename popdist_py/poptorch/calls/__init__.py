"""What goes into a call of a wrapped model and comes out of it.

Here live nested values, custom types, the sizes of batches, and host-device transfer.
Nothing here knows options, models or replicas. May call: enums, logger, errors.
"""
