"""Supervision of a running job, from its start to its result.

Contains the supervisor, time limits, hang detection, stopping, mpirun's process, the control
channel, the clocks of hosts, and the values that describe a job and its end.
"""
