"""The agent: one on each node. It starts, watches and stops engines as its assignments say.

Here belongs what touches a node: facts, weights, processes. It decides nothing about the fleet, and no engine of it
ends because etcd, a controller or the agent itself is gone.
"""
