"""Horovod's names that belong to no framework: every object is that of popdist_py."""
