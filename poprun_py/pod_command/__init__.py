"""The command ``poprun-py-pod``: words -> what is asked of a pod -> tables or JSON, and a code.

Nothing here keeps a pod (popdist_py/pods) or decides what a partition may be.
May call: pod_server, errors.
"""
