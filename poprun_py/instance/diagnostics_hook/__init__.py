"""The folder of the diagnostics hook, which the wrapper puts first on PYTHONPATH of its program."""
