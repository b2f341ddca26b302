"""One attempt at a job, with its processes, output, keyboard, steps and metrics.

The caller passes a Job. Modules here make no plans, and do not know options or machines.
"""
