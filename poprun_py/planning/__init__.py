"""The plan of a launch, which says where each instance runs and by which command.

Contains the inputs, the topology, placement, variables, the command lines of the MPI
implementations, the decision about a partition, and the plan with its file. No module here starts a
process of the job.
"""
