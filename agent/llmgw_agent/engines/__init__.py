"""One module an engine: how it is launched (a pure function of the order) and how it is asked what it does.

Here belongs what differs between engines; what they share (processes, logs, ports) is the host's and the supervisor's.
"""
