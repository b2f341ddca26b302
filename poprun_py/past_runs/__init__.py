"""Finished runs: reading their files, measuring and comparing them.

No module here starts a job or writes a file.
"""
