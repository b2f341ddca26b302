"""From a data set to combined batches: loaders, samplers, and the loader process.

Here live DataLoader, AsynchronousDataAccessor, and the memory that processes share.
Nothing here knows models. May call: options, calls, enums, logger, errors, and the
library's sharding, context, collectives, activities and timeline.
"""
