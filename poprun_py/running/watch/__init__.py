"""Observation of a running job, which finds where time goes and which instance is slow.

Contains the state of an instance at one look, stragglers, the live view, and the log of steps. The
supervisor talks to the instances and passes their reports on.
"""
