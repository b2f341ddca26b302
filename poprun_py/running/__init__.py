"""Runs a job: supervision, observation, metrics, the screen and the keyboard."""
