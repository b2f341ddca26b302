"""Metrics of a running job for OpenMetrics, TensorBoard, and Weights & Biases.

Contains the recorders that gather them, the processes that pass them on, and the texts of the
endpoint. Serving, writing and sending happen in processes of their own, so they cannot delay a job.
"""
