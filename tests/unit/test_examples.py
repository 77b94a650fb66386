"""Every file under examples/ is what it says it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmgw.cli.catalog_text import catalog_yaml
from llmgw.config import AgentConfig, Config, ControllerConfig, GatewayConfig, load_config
from llmgw.core.catalog_load import load_catalog

EXAMPLES = Path(__file__).parents[2] / "examples"

CONFIGS: dict[str, type[Config]] = {
    "agent.yaml": AgentConfig,
    "controller.yaml": ControllerConfig,
    "gateway.yaml": GatewayConfig,
}
CATALOGS = ["catalog.yaml", "gpu-catalog.yaml"]


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {*CONFIGS, *CATALOGS}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str) -> None:
    config = load_config(EXAMPLES / name, CONFIGS[name], env={})
    assert isinstance(config, CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_what_configs_leave_out_in_comments_is_right_too(name: str, tmp_path: Path) -> None:
    """Each commented line that holds a setting can be switched on."""
    lines = (EXAMPLES / name).read_text().splitlines()
    settings = [line.replace("# ", "", 1) if _is_setting(line) else line for line in lines]
    for secret in ("etcd-ca.pem", "client.pem", "client.key", "etcd.password"):
        (tmp_path / secret).write_text("x\n")
    (tmp_path / name).write_text("\n".join(settings).replace("http://", "https://"))
    load_config(tmp_path / name, CONFIGS[name], env={})
    assert sum(map(_is_setting, lines)) == {"agent.yaml": 4, "controller.yaml": 6, "gateway.yaml": 0}[name]


def _is_setting(line: str) -> bool:
    head, colon, _ = line.strip().removeprefix("# ").removeprefix("  - {").partition(":")
    return line.strip().startswith("# ") and bool(colon) and head.replace("_", "").isalpha() and head.islower()


@pytest.mark.parametrize("name", CATALOGS)
def test_catalogs(name: str) -> None:
    loaded = load_catalog([(name, (EXAMPLES / name).read_text())])
    assert loaded.sections == {"models", "aliases"}
    assert load_catalog([(name, catalog_yaml(loaded.catalog))]).catalog == loaded.catalog


def test_the_demo_catalog_names_the_weights_that_the_demo_provides() -> None:
    catalog = load_catalog([("catalog.yaml", (EXAMPLES / "catalog.yaml").read_text())]).catalog
    assert catalog.models["gemma-270m"].source == "gemma/gemma-270m.gguf"
    assert catalog.aliases["gpt-4o-mini"].model == "gemma-270m"
    (profile,) = catalog.models["gemma-270m"].profiles
    assert (profile.engine, profile.gpus_per_node) == ("llama.cpp", 0)
