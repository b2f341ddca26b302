"""The weights on the device and on the host: which copy is newer, and when it is copied.

Here live the device's copy, replica-grouped weights, and the user's module while wrapped.
Nothing here updates a weight. May call: enums, logger, errors.
"""
