"""The weights on the device and on the host: whose copy is newer, who reads it when.

Here live the device's copy, replica-grouped weights, and the user's module while wrapped.
Nothing here updates a weight. May call: enums, errors.
"""
