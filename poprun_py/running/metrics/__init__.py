"""Metrics of a running job for OpenMetrics, TensorBoard, and Weights & Biases.

Child processes serve or write the metrics, so a slow disk or network cannot delay the job.
"""
