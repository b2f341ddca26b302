"""Readers of finished runs, with their measurement and comparison.

No module of this package starts a job.
"""
