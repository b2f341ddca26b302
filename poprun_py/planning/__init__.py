"""Launch plans: where each instance of a job runs, and which mpirun command starts it.

The package gathers the inputs of a launch plan, and assigns replicas, IPUs, CPUs and environment
variables to instances. The package also decides about the IPU partition, writes the mpirun command,
saves plans in files, and warns about problems of plans.
"""
