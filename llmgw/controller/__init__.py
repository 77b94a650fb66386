"""The controller process: follow the store, lead if elected, reconcile, commit.

Here belong the loop around the pure core and the process that runs it. Decisions belong to llmgw.core.
"""
