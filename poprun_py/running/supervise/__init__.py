"""Supervision of a running job, from its start to its result.

Contains the supervisor, the mpirun process, the control channel, the start and the shutdown of a
job, its time limits, hang detection, and the values that describe a job and its end.
"""
