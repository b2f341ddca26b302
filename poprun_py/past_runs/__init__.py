"""Code that reads the files of earlier runs, and measures and compares these runs.

No module of this package starts a job.
"""
