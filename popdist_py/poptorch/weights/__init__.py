"""A model's weights on the device and on the host, and the copies between device and host.

The package contains the device's tensors, replica-grouped weights and gradient hooks. The package
also contains the subclasses that replace the classes of wrapped modules and of their tensors.
Nothing here updates a weight.
May call: enums, logger, errors.
"""
