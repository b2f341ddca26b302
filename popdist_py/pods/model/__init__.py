"""The parts of a pod, the rules for these parts, and the interface of a pod store.

The packages ``folder`` and ``server`` implement the interface. No module of this package opens a
file or a connection.
May call: device_numbers, errors.
"""
