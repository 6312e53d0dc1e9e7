"""Which addresses a URL of a request may lead to."""

from __future__ import annotations

import pytest

from bequest.server.transport.fetching import is_allowed, is_public

PRIVATE = [
    *("127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1"),
    *("169.254.169.254", "100.64.0.1", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1"),
    # An address within another one: by a mapping, by 6to4, by a NAT64 gateway, by Teredo.
    *("::ffff:10.0.0.1", "2002:a00:1::", "64:ff9b::a00:1", "64:ff9b::7f00:1", "2001:0:0:0:0:0:f5ff:fffe"),
    *("localhost", "", "10.1", "0x7f.1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


def test_hosts_on_the_list() -> None:
    assert is_allowed("Images.Example.ORG.", ["images.example.org"]) and is_allowed("a.b.org", ["*.b.org"])
    assert is_allowed("anything", ["*"]) and not is_allowed("b.org", ["*.b.org"])
    assert not is_allowed("evilb.org", ["*.b.org"]) and not is_allowed("a.b.org.evil.com", ["a.b.org", "*.b.org"])
