"""Observation of a running job, to find out how fast it trains and which instance is slow.

Terms of this package:

- A snapshot holds the counters that one instance's wrapper reports at one time.
- An instance state is computed from two snapshots, such as the speed between them.
- In one round, the observer asks all running instances for a snapshot.
- A view of the job holds the states of all instances after a round. Each line of the file
  ``looks.jsonl`` is a view. The documentation for users calls a round a look.
- A step record describes one training step of one instance.
- A recorder receives step records and views, and writes them to files or sends them elsewhere.
"""
