"""The list of the runs in a folder: the state of each run, filters, and the removal of old runs.

No module of this package reads all training steps of a run, because the list must be fast.
"""
