"""Metrics of a running job for OpenMetrics, TensorBoard, and Weights & Biases.

Recorders in the launcher gather the metrics. Child processes serve the metrics, write them to files
and send them to servers, so a slow disk or network cannot delay the job.
"""
