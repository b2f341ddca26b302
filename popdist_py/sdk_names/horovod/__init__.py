"""Horovod under its own name; ``horovod.torch`` is the part that PyTorch programs use."""

# The version whose API this is: programs compare it.
__version__ = "0.28.1"
