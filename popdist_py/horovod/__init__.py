"""Horovod's API on the collectives of a job.

``torch`` is Horovod's PyTorch API. PopTorch programs use it with PopDist to average losses and to
broadcast initial weights. ``common`` contains Horovod's errors and helper functions. Horovod's
ranks are the instances of the job. Importing this package does not import torch. Nothing here
communicates by itself. May call: nothing.
"""
