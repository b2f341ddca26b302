"""The assignment of the parts of a model to IPUs and pipeline stages.

This package contains the annotations that a program adds to a model, and the execution strategies.
No module here runs a model.
May call: tracing, enums, errors.
"""
