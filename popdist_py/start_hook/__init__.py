"""The folder on PYTHONPATH that gives a Python, when it starts, the SDK's names and our back end."""
