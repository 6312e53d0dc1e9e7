"""The address of a store of estates, and why one cannot be used: errors that say what to do."""

from __future__ import annotations

import builtins
import socket
import sys
from types import ModuleType, SimpleNamespace

import pytest

from bequest.engine.config import EngineConfig
from bequest.engine.types.store_url import StoreUrl, parse_store_url
from bequest.engine.vault import mooncake
from bequest.engine.vault.mooncake import MooncakeStore, StoreUnusable


def test_addresses() -> None:
    assert parse_store_url("mooncake://master:50051") == StoreUrl("master", 50051)
    given = "mooncake://10.0.0.1:50051/chats?metrics=9100&host=10.0.0.7&protocol=rdma&devices=mlx5_0"
    assert parse_store_url(given) == StoreUrl("10.0.0.1", 50051, "chats", 9100, "10.0.0.7", "rdma", "mlx5_0")
    assert parse_store_url("mooncake://[::1]:7/x").master == "::1"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("redis://a:1", "must be mooncake://MASTER:PORT, not redis://a:1"),
        ("mooncake://a", "must be mooncake://MASTER:PORT"),
        ("mooncake://a:99999", "must be mooncake://MASTER:PORT"),
        ("mooncake://a:1/x.y", "not made of letters, digits and _: x.y"),
        ("mooncake://a:1?copies=3", "an option that is none: copies"),
        ("mooncake://a:1?protocol=ftp", "other than tcp and rdma: ftp"),
        ("mooncake://a:1?metrics=many", "a metrics port that is none: many"),
    ],
)
def test_what_is_no_address(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^estate_store ") as raised:
        EngineConfig(model="m", estate_store=given)
    assert said in str(raised.value)


def test_settings_that_go_together() -> None:
    url = "mooncake://a:1"
    assert EngineConfig(model="m", estate_store=url, durable_by_default=True).keeps_estates
    with pytest.raises(ValueError, match="set one of them"):
        EngineConfig(model="m", estate_store=url, estate_dir="/x")
    with pytest.raises(ValueError, match="warm_estates needs estate_dir"):
        EngineConfig(model="m", estate_store=url, warm_estates=True)
    with pytest.raises(ValueError, match="estate_dir or estate_store"):
        EngineConfig(model="m", durable_by_default=True)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(StoreUnusable, match=r"pip install 'bequest\[mooncake\]'"):
        MooncakeStore(StoreUrl("a", 1))


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *rest: object) -> ModuleType:
        if name == "mooncake.store":
            raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")
        return importing(name, *rest)  # type: ignore[arg-type]

    importing = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(StoreUnusable, match=r"libibverbs\.so\.1 is not installed; .*apt-get install libibverbs1"):
        MooncakeStore(StoreUrl("a", 1))


def test_without_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_import", SimpleNamespace)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(StoreUnusable, match=f"its master does not answer at 127.0.0.1:{port}: Connection refused"):
        MooncakeStore(StoreUrl("127.0.0.1", port))
