"""`python -m llmgw_agent`: the process, as its command starts it."""

from llmgw_agent.run import main

main()
