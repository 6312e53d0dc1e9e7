"""The files of deploy/cluster say what the commands understand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from bequest.cluster.command import _parsers
from bequest.server.process.options import parse

FOLDER = Path(__file__).parents[2] / "deploy" / "cluster"


def text_of(name: str) -> str:
    """Without comments, and with continued lines in one."""
    lines = [line for line in (FOLDER / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("\\\n", " ")


def check_serve(words: list[str]) -> None:
    """A file of options is the machine's own."""
    if "--config" in words:
        at = words.index("--config")
        del words[at : at + 2]
    engine, server = parse(["serve", *words])
    assert engine.estate_peers and engine.estate_dir is not None and server.replica_tag is not None
    assert engine.estate_dir.endswith("/" + server.replica_tag), "a folder is named by its tag"


def test_a_replica_of_systemd() -> None:
    [line] = re.findall(r"^ExecStart=(.*)$", text_of("bequest@.service").replace("%i", "1"), re.MULTILINE)
    program, command, *words = shlex.split(line)
    assert program.endswith("/bequest") and command == "serve"
    check_serve(words)


def test_the_cluster_of_systemd() -> None:
    [line] = re.findall(r"^ExecStart=(.*)$", text_of("bequest-cluster.service"), re.MULTILINE)
    words = shlex.split(line)[1:]
    assert words[:2] == ["cluster", "up"]
    parser, _ = _parsers()
    given, rest = parser.parse_known_args(words[1:])
    assert given.replicas == 3 and rest == ["--config", "/etc/bequest/bequest.toml"]


def test_compose() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    replicas = {name: one for name, one in services.items() if name != "router"}
    assert set(services["router"]["depends_on"]) == set(replicas)
    for name, one in replicas.items():
        command, *words = shlex.split(one["command"])
        assert command == "serve" and words[words.index("--replica-tag") + 1] == name
        check_serve(words)


def test_kubernetes() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    assert [one["kind"] for one in documents] == [
        *("Service", "StatefulSet", "PersistentVolumeClaim", "Deployment", "Service")
    ]
    [container] = documents[1]["spec"]["template"]["spec"]["containers"]
    script = container["args"][0].replace("$tag", "r0")
    check_serve(shlex.split(script.partition("exec bequest serve ")[2]))
    assert documents[1]["spec"]["serviceName"] == documents[0]["metadata"]["name"]


@pytest.mark.parametrize("page", ["README.md"])
def test_the_commands_of_the_page(page: str) -> None:
    found = re.findall(r"^bequest cluster (configure .*)$", text_of(page), re.MULTILINE)
    assert len(found) == 3
    for line in found:
        given, rest = _parsers()[0].parse_known_args(shlex.split(line))
        assert not rest and len(given.replica) == 3
