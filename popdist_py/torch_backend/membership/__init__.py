"""The membership of this process in a group, with its time-outs and errors.

membership         joins the group at the first call, applies time-outs and converts errors
group_store        the key-value store of a group, with waits that end when a rank ends
generations        separate store keys for successive groups of the same name
store_meeting      the exchange of small values over the store while the ranks join
group_settings     the settings of a group, from variables of this library and of gloo
monitored_barrier  a barrier whose error names the missing ranks
errors             the classes of errors

No module of this folder depends on what a call computes.
May call: communicators, collectives, within_host, environment, errors.
"""
