"""Readers of finished runs, and the numbers that follow from their files.

No module here runs a job or writes a file.
"""
