"""A running job's numbers for tools that people already have: OpenMetrics, TensorBoard, W&B.

Here live the recorders that gather them, the processes beside the launcher that hand them on, and
what an endpoint shows.
Nothing here may hold up a job: what serves, writes or sends runs in a process of its own.
May call: observation, errors.
"""
