"""`python -m llmgw.gateway`: the process, as its command starts it."""

from llmgw.gateway.run import main

main()
