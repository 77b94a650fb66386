"""Pure decisions: what is wanted, what is there, what follows.

Here belongs what can be computed from arguments alone. No clock, I/O, logging, randomness or waiting: `now` and ids are
arguments, expected outcomes are values, reasons are data. What records can show of the invariants is checked here too.
"""
