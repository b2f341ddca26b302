"""The command ``poprun-py-pod``: words -> what is asked of a pod -> tables or JSON, and a code.

The grammar is that of V-IPU's command line: a verb, an object, a name, options.
Nothing here keeps a pod (popdist_py/pods) or decides what a partition may be.
May call: pods (of the library), pod_server, command_name, errors,
terminal, versions.
"""
