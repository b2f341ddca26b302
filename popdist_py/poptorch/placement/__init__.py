"""The assignment of a model's blocks of operations to IPUs and pipeline stages.

The package ``placement`` contains the annotations that a program adds to a model, and the execution
strategies. No module here runs a model.
May call: tracing, enums, errors.
"""
