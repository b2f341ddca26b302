"""A job's partition: which one it uses, what is done to it before and after, and its IPUs.

Nothing here keeps a pod (popdist_py/pods), or is a command of its own.
May call: config, console, errors, and the library's environment, device_numbers and pods.
"""
