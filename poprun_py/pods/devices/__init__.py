"""``gc-info`` and ``gc-monitor``, which show emulated IPUs as Graphcore's tools do.

Where a pod is configured, they show the IPUs of its partitions. They ask
running jobs which IPUs these hold, and change nothing.
"""
