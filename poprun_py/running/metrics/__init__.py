"""Metrics of a running job for OpenMetrics, TensorBoard, and Weights & Biases.

Recorders in the launcher gather the metrics. Child processes serve, write and send them, so a slow
disk or network cannot delay the job.
"""
