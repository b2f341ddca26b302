"""The part of this process in one group: joining, time-outs, errors, leaving.

membership         what calls go through: one at a time, in time, with errors of their class
group_store        the store of a group, with waits that end when a rank ends
generations        keys of its own for each group that is made in one store
store_meeting      how the processes of a group meet, over that store
group_settings     how they communicate, by our variables and those of gloo
monitored_barrier  a barrier that names the ranks that do not come
errors             the classes of errors

Nothing here knows what a call does. May call: communicators, collectives, within_host,
environment, errors.
"""
