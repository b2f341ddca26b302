"""The folder on PYTHONPATH that gives a Python that starts the SDK's names and our back end."""
