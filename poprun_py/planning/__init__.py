"""The plan of a launch, which says where each instance runs and which command starts it.

The package gathers the inputs of a plan, assigns replicas and IPUs to instances, places instances
on CPUs, sets their environment variables, decides about the partition, writes the command line of
the installed MPI, saves plans in files, and warns about problems of a plan. The modules here do not
start processes of the job.
"""
