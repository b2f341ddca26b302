"""Code that each Python process of a job runs at its start, with this folder on PYTHONPATH."""
