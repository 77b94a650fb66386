"""What each process can be told, and reading it: settings (types), load, check, file.

Read from YAML by `llmgw.core.document` rules: unknown keys are refused with line and nearest name; relative paths are
relative to the file. Secrets come from `*_file` settings, never from the text itself.
"""

from llmgw.config.check import split_listen
from llmgw.config.file import decode_text, read_secret, read_text
from llmgw.config.load import load_config
from llmgw.config.settings import (
    AGENT_PORT,
    GATEWAY_PORT,
    PAGE_PORT,
    AgentConfig,
    ClientConfig,
    Config,
    ControllerConfig,
    EtcdConfig,
    FabricConfig,
    GatewayConfig,
    NamedEngine,
)

__all__ = [
    "AGENT_PORT",
    "GATEWAY_PORT",
    "PAGE_PORT",
    "AgentConfig",
    "ClientConfig",
    "Config",
    "ControllerConfig",
    "EtcdConfig",
    "FabricConfig",
    "GatewayConfig",
    "NamedEngine",
    "decode_text",
    "load_config",
    "read_secret",
    "read_text",
    "split_listen",
]
