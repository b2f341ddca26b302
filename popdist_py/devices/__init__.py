"""How a program that no launcher started has devices of a pod to itself.

Nothing here knows what a device is held for, keeps a pod, or imports torch or NumPy.
May call: errors, pods.
"""
