"""Observation of a running job: how fast the job trains and which instance is slow.

In one round, the observer asks the wrappers of all running instances for their counters. An
instance state is computed from two answers of the instance's wrapper. A view of the job holds the
states of all instances after a round. The user documentation calls a round a look. A recorder
receives views and step records, and writes them to files or sends them to another process.
"""
