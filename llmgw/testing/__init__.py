"""The means of testing the whole system: simulation, faults, doubles, checkers, real etcd, a tiny model.

Here belongs what more than one test needs. Nothing that ships to users may import it.
"""
