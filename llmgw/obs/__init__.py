"""What people and Prometheus see of a running process: logs and metrics; and the clocks and sources of ids.

Here belongs what observes. Nothing here decides, and nothing here reads the store.
"""
