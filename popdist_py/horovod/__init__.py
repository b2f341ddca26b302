"""Horovod's API on the collectives of a job: ``popdist_py.horovod.torch`` is its PyTorch face.

PopTorch programs use it beside PopDist, for means of losses and for one start of all weights.
Horovod's ranks are the instances of the job. Nothing here communicates by itself, and importing
this package imports no torch. ``common`` has the names that programs import beside it: errors, and
small helpers. May call: nothing; its rooms are ``torch`` and ``common``.
"""
