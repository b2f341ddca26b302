"""The folder that the wrapper puts first on the PYTHONPATH of Python programs, for diagnostics."""
