"""The folder on PYTHONPATH that gives a Python of a job SDK names, our back end, MPI its place."""
