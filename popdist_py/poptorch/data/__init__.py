"""Loading of batches from a data set, in the training process or in a loader process.

The package contains DataLoader, AsynchronousDataAccessor and their samplers. The package ``data``
also contains the code for shared memory between the training process and the loader process.
Nothing here uses a model.
May call: options, calls, enums, logger, errors, and the library's sharding, context, collectives,
activities, torch_states and timeline.
"""
