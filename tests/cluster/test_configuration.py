"""The router's configuration as text. That HAProxy does what it says is tested in test_routing.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bequest.cluster.command import main
from bequest.cluster.haproxy import Backend, Holder, Routing, configuration, tenants_map
from bequest.server.wire.names import new_id
from bequest.server.wire.replicas import TAGGED_ID

REPLICAS = [Backend("r1", "127.0.0.1", 8101), Backend("far", "fd00::2", 8000)]


def routing(**more: object) -> Routing:
    fields = {"host": "127.0.0.1", "port": 8000, "backends": REPLICAS, "admin_socket": "/run/a.sock"}
    fields |= {"tenants": "/run/tenants.map", "peers": {"router1": "127.0.0.1:9000"}}
    return Routing(**{**fields, **more})  # type: ignore[arg-type]


def lines(text: str, section: str) -> list[str]:
    """Of one section."""
    found = re.search(rf"^{section}\n((?:    .*\n)*)", text, re.MULTILINE)
    assert found is not None
    return [line.strip() for line in found[1].splitlines()]


def test_every_replica_is_in_both_backends() -> None:
    """An address of IPv6 stands in brackets. The second backend does not check the same servers again."""
    text = configuration(routing())
    assert lines(text, "backend replicas")[-2:] == ["server r1 127.0.0.1:8101 check", "server far [fd00::2]:8000 check"]
    assert lines(text, "backend asked")[-2:] == [
        "server r1 127.0.0.1:8101 track replicas/r1",
        "server far [fd00::2]:8000 track replicas/far",
    ]


def test_an_owner_that_is_down_or_unknown_is_said_to_be_gone() -> None:
    said = [line for line in lines(configuration(routing()), "frontend api") if " gone " in line]
    assert len(said) == 3 and "!{ var(txn.to) -m str r1 far }" in said[0]
    assert "!{ srv_is_up(replicas/far) }" in said[2]


def test_no_replica_at_all_is_a_configuration() -> None:
    text = configuration(routing(backends=[]))
    assert "-m str -- - }" in text and not re.search(r"^    server ", text, re.MULTILINE)


@pytest.mark.parametrize("open_host", [True, False])
def test_a_loopback_router_leaves_the_name_that_was_called(open_host: bool) -> None:
    """Replicas refuse names that are not this machine's, as a server alone does."""
    assert ("set-header Host" in configuration(routing(open_host=open_host))) == open_host


def test_what_knows_all_replicas_has_their_metrics() -> None:
    """Without it, the metrics of one would look like those of all."""
    text = configuration(routing(overview="127.0.0.1:8099"))
    assert lines(text, "backend overview") == ["server overview 127.0.0.1:8099"]
    assert "use_backend overview if { path /cluster/state }" in text and "scrape each" not in text
    assert "scrape each" in configuration(routing())


def test_a_request_is_sent_on_twice_at_most() -> None:
    """To the owner, and to whom that one names: what it had was taken over. Not if the request named somebody."""
    redirects = [line for line in lines(configuration(routing()), "backend replicas") if "redirect" in line]
    assert len(redirects) == 4 and all("{ status 421 } !{ var(txn.asked) -m found }" in line for line in redirects)
    assert all("bequest-owner=%[res.hdr(X-Bequest-Replica)]" in line for line in redirects)
    assert [line for line in redirects if "bequest-again=1" in line] == redirects[2:]
    assert all("{ var(txn.sent) -m found } !{ var(txn.again) -m found }" in line for line in redirects[2:])


def test_bodies_are_read_as_json_where_they_say_something() -> None:
    """64 KiB cost a third of a millisecond each time."""
    reading = [line for line in lines(configuration(routing()), "frontend api") if "json_query" in line]
    parents, prompts = reading[:3], reading[3:]
    assert all("if { var(txn.refers) -m bool } !{ var(txn.parent) -m found }" in line for line in parents)
    assert all("!{ var(txn.parent) -m found } !{ var(txn.asked) -m found }" in line for line in prompts)
    assert all((" talks " in line) == ("messages[" in line) for line in prompts), "each endpoint has its own fields"


def test_https() -> None:
    text = configuration(routing(certificate="/etc/c.pem"))
    assert "bind 127.0.0.1:8000 ssl crt /etc/c.pem alpn h2,http/1.1" in text


def test_routers_share_what_they_learn() -> None:
    text = configuration(routing(peers={"router1": "10.0.0.1:9000", "router2": "10.0.0.2:9000"}))
    assert lines(text, "peers routers") == ["peer router1 10.0.0.1:9000", "peer router2 10.0.0.2:9000"]


def test_the_pattern_of_ids_is_the_servers_own() -> None:
    text = configuration(routing())
    assert f"-m reg ^{TAGGED_ID}$" in text
    assert re.fullmatch(TAGGED_ID, new_id("resp_", "r1"))


def test_keys_are_known_by_their_digests() -> None:
    """Behind the tenant of a limited key stands the time from one request to the next, in 20 µs."""
    holders = {"ab01": Holder("acme"), "00ff": Holder("blue", 7000), "00aa": Holder("rare", 0.001)}
    assert tenants_map(holders) == "00AA rare 180000000\n00FF blue 429\nAB01 acme\n"


def test_a_replica_that_is_known_by_name_is_looked_up_again() -> None:
    text = configuration(routing(backends=[Backend("r1", "bequest-0.replicas", 8000), *REPLICAS[1:]]))
    assert lines(text, "resolvers system") == ["parse-resolv-conf", "hold valid 2s"]
    named, numbered = lines(text, "backend replicas")[-2:]
    assert named == "server r1 bequest-0.replicas:8000 check resolvers system init-addr last,libc,none"
    assert "resolvers" not in numbered
    assert "resolvers system" not in configuration(routing())


def test_configure_writes_both_files(tmp_path: Path) -> None:
    """The key itself is in neither."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\ntenant = "acme"\nkey = "sk-secret"\n')
    flags = ["--replica", "r1=10.0.0.1:8000", "--replica", "r2=[fd00::2]:8000", "--folder", str(tmp_path)]
    assert main(["configure", *flags, "--seen-as", "/etc/haproxy", "--api-key-file", str(keys)]) == 0
    text, tenants = (tmp_path / "haproxy.cfg").read_text(), (tmp_path / "tenants.map").read_text()
    assert lines(text, "backend replicas")[-1] == "server r2 [fd00::2]:8000 check"
    assert "map_str(/etc/haproxy/tenants.map,-)" in text
    assert tenants.endswith(" acme\n") and "sk-secret" not in text + tenants


@pytest.mark.parametrize("host, opened", [("0.0.0.0", True), ("127.0.0.1", False), ("localhost", False)])
def test_configured_for_others_it_is_called_by_any_name(tmp_path: Path, host: str, opened: bool) -> None:
    """Replicas on 127.0.0.1 would refuse the name that clients of another machine call the router by."""
    assert main(["configure", "--replica", "r1=127.0.0.1:8101", "--folder", str(tmp_path), "--host", host]) == 0
    assert ("set-header Host localhost" in (tmp_path / "haproxy.cfg").read_text()) == opened


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--replica", "r1=host:8102"], "--replica r1 is there 2 times"),
        (["--port", "65486"], "--port must be from 1 to 65485"),
        (["--port", "0"], "--port must be from 1 to 65485"),
        (["--seen-as", "/my folder"], "haproxy reads no path such as '/my folder'"),
    ],
)
def test_configure_writes_nothing_that_haproxy_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(["configure", "--replica", "r1=host:8101", "--folder", str(tmp_path), *flags]) == 1
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["r1", "r1=host", "R1=host:1", "r1=:1", "r1=host:x", "r1=host:0", "r1=host:65536"])
def test_configure_says_what_a_replica_is(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configure", "--replica", text, "--folder", str(tmp_path)]) == 1
    assert "--replica must be TAG=HOST:PORT" in capsys.readouterr().err
