"""Horovod's API, implemented with the collectives of a job.

The package ``torch`` is Horovod's PyTorch API. PopTorch programs use Horovod together with PopDist
to average losses and to broadcast initial weights. The package ``common`` contains Horovod's errors
and helper functions. Each instance of the job is a Horovod rank. Importing ``popdist_py.horovod``
does not import torch. No module of this package opens connections: ``popdist_py.collectives`` does.
May call: nothing.
"""
