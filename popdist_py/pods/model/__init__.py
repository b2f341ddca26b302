"""The parts of a pod, the rules for them, and the interface of a pod store.

``PodStore`` is the interface that ``folder`` and ``server`` implement. Apart from the functions
that read the user's name or the host's name, the functions only compute with their arguments.
May call: device_numbers, errors.
"""
