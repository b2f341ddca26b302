"""The input and the results of the model of an IPU's memory and time, for one run.

forward_steps       the steps of a forward pass, before they become a graph
graph_of_steps      the conversion of the steps to the graph that an IPU compiler would make
model_graph         the graph of a forward pass, with the placement of its operations
run_from_command    the configuration of a run, from the options of ``python -m popdist_py.ipu``
micro_batch_times   the times of the micro-batches of a call
timeline_rows       the activities of the IPUs as spans of the timeline
device_document     the memory, schedule and time of a model as JSON values

No module of this package imports torch, reads PopTorch's options, logs, or writes files.
May call: ipu, searches, errors.
"""
