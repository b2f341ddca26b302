"""The emulated IPUs of this machine as Graphcore's tools show them: ``gc-info``, ``gc-monitor``.

Nothing here starts a job, or changes one: running jobs are asked what they hold.
May call: supervision, planning, errors, terminal, versions, and the library's pods.
"""
