"""The errors and helper functions of ``horovod.common``, which do not depend on a framework.

Importing this package does not import torch. No module of this package communicates.
May call: nothing.
"""
