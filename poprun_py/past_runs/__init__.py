"""Code that reads the recorded files of runs, measures the runs and compares them.

No module of this package starts a job.
"""
