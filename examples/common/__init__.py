"""Modules that several examples share: sample data, argument parsing, errors and figures.

A program of ``examples/NAME/`` finds these modules after
``sys.path.insert(0, str(Path(__file__).resolve().parents[1]))``. Importing them also replaces the
traceback of a missing optional package by one line, so programs import such packages afterwards.
"""

from .optional_packages import name_missing_packages

name_missing_packages()
