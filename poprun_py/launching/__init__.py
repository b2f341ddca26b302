"""The steps of one launch, from its options to its result.

A launch plans a job, waits for cores and IPUs, runs the job, and restarts the job after failures.
This package also leases cores, gets a partition of a pod for the job, and writes the files of a run
(report, page, timeline, metrics). Other packages supervise processes and draw pages.
"""
