"""Horovod's errors and helper functions, imported from popdist_py."""
