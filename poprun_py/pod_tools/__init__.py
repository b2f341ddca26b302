"""The commands that show and change pods of emulated IPUs, and the pod server.

popdist_py/pods stores the pods and decides what a partition may be.
"""
