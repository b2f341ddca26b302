"""The plan of a launch, which says where each instance runs and by which command.

Contains the inputs of a plan, the topology, the placement on CPUs, the variables of instances, the
command lines of the MPI implementations, the decision about a partition, and the plan with its file
and its warnings. The modules here start no process of the job.
"""
