"""What one forward of a model does: its losses, its operations, their places, and what it changes.

One function mode follows torch's functions, and one dispatch mode notes the operations below them.
Nothing here compiles or chooses how a model runs. May call: calls, weights, enums, errors.
"""
