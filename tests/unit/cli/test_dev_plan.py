"""`llmgw dev` decides before it starts anything: ports, shares of the machine, configuration files."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from llmgw.cli.dev_plan import Child, DevOptions, Ports, plan_dev
from llmgw.errors import Invalid, Refused


def config(child: Child) -> dict[str, object]:
    read: dict[str, object] = yaml.safe_load(child.text)
    return read


def test_a_taken_port_is_passed_over_and_said() -> None:
    ports = Ports(free=lambda port: port != 8880)
    plan = plan_dev(DevOptions(data=Path("/d")), ports)
    assert plan.gateway_urls == ("http://127.0.0.1:8881",)
    assert plan.notes == ("port 8880 is taken, gateway-1 listens on 8881",)


def test_no_port_is_given_twice() -> None:
    plan = plan_dev(DevOptions(data=Path("/d"), controllers=9, gateways=9, nodes=20), Ports(free=lambda port: True))
    listens = [str(config(child)["listen"]) for child in plan.children if child.config and "listen" in config(child)]
    urls = [*plan.gateway_urls, *plan.page_urls, *plan.etcd_urls]
    assert len(set(urls)) == len(urls)
    assert len(set(listens)) == len(listens)


def test_only_what_listens_takes_a_port() -> None:
    taken = Ports(free=lambda port: not 8890 <= port < 8900)
    assert plan_dev(DevOptions(data=Path("/d"), nodes=3), taken).notes == ()


def test_nothing_free_nearby_is_refused() -> None:
    with pytest.raises(Refused, match="no free port for etcd-1"):
        plan_dev(DevOptions(data=Path("/d")), Ports(free=lambda port: False))


def test_nodes_share_memory_and_engine_ports_without_overlap() -> None:
    plan = plan_dev(DevOptions(data=Path("/d"), nodes=3), Ports(free=lambda port: True))
    agents = [config(child) for child in plan.children if child.kind == "agent"]
    shares = [float(str(agent["share"])) for agent in agents]
    assert sum(shares) <= 1.0 + 1e-5
    taken: set[int] = set()
    for agent in agents:
        ports = agent["engine_ports"]
        assert isinstance(ports, list)
        span = set(range(ports[0], ports[1] + 1))
        assert not span & taken
        taken |= span
    assert {agent["on_exit"] for agent in agents} == {"stop"}


def test_three_members_keep_their_peer_ports() -> None:
    options = DevOptions(data=Path("/d"), etcd_members=3)
    first = plan_dev(options, Ports(free=lambda port: True))
    again = plan_dev(options, Ports(free=lambda port: True), kept_peers=(12000, 12001, 12002))
    assert len(first.peer_ports) == 3
    assert again.peer_ports == (12000, 12001, 12002)
    with pytest.raises(Refused, match="port 12001 is in use"):
        plan_dev(options, Ports(free=lambda port: port != 12001), kept_peers=(12000, 12001, 12002))


def test_another_number_of_members_is_refused() -> None:
    with pytest.raises(Refused, match="holds an etcd of 3 members"):
        plan_dev(DevOptions(data=Path("/d")), Ports(free=lambda port: True), kept_peers=(1, 2, 3))


def test_settings_reach_every_process_of_their_kind() -> None:
    options = DevOptions(data=Path("/d"), settings={"agent": {"session_ttl_s": 6}})
    plan = plan_dev(options, Ports(free=lambda port: True))
    assert [config(child)["session_ttl_s"] for child in plan.children if child.kind == "agent"] == [6, 6]


def test_unknown_kind_in_settings_is_an_error() -> None:
    with pytest.raises(Invalid, match="unknown process kind 'agnet'"):
        plan_dev(DevOptions(data=Path("/d"), settings={"agnet": {}}), Ports(free=lambda port: True))
