"""Code that every Python of a job runs when it starts, because this folder is on its PYTHONPATH."""
