"""The catalog as text: what `llmgw get catalog` prints."""

from __future__ import annotations

from typing import Any

import yaml

from llmgw.core.catalog import Catalog
from llmgw.core.catalog_dump import written


class _Dumper(yaml.SafeDumper):
    """Plain YAML without anchors: our reader refuses them, and equal values are not the same value."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # PyYAML's signature
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002  # PyYAML's
        super().increase_indent(flow, False)  # lists are indented below their key


def catalog_yaml(catalog: Catalog) -> str:
    """`catalog` in the one form that `llmgw apply` reads."""
    return to_yaml(written(catalog))


def to_yaml(value: Any) -> str:
    """Plain values as YAML; texts that would read as something else are quoted."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text
