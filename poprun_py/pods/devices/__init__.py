"""The emulated IPUs of this machine as Graphcore's tools show them: ``gc-info``, ``gc-monitor``.

Where a pod is configured they are those of its partitions.
Nothing here starts a job, or changes one: running jobs are asked what they hold.
May call: leases (for the names of users), supervision, errors, terminal, versions,
and the library's pods.
"""
