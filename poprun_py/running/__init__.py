"""One attempt at a job, with its processes, output, keyboard, steps and metrics.

The launcher hands it a Job. No module here plans, or knows options or hosts.
"""
