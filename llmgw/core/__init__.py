"""Pure decisions: what is wanted, what is there, what follows.

Here belongs what can be computed from arguments alone. No clock, I/O, logging, randomness or waiting: `now` and ids are
arguments, expected outcomes are values, reasons are data. Every invariant of the system is checked by a function here.
"""
