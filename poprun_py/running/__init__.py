"""One attempt at a job, with its processes, output, keyboard, steps and metrics.

The caller passes a Job. The modules of this package make no plans, and know neither command-line
options nor machines.
"""
