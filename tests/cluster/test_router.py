"""A router as a process: what it finds at its port when it starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from bequest.cluster import router as routers
from bequest.cluster.router import Router, RouterError, RouterPlace
from tests.cluster.places import free_ports

pytestmark = pytest.mark.cluster


def place(folder: Path) -> RouterPlace:
    port, peer = free_ports(2)
    return RouterPlace(host="127.0.0.1", port=port, folder=folder, peers={"router1": f"127.0.0.1:{peer}"})


def test_a_router_that_was_left_behind_is_ended(tmp_path: Path) -> None:
    """Its cluster was killed. Both would listen, and one of them knows servers that are gone."""
    where = place(tmp_path)
    old, new = Router(where, {}), Router(where, {})
    old.start([])
    try:
        new.start([])
        assert old._process is not None and old._process.wait(10) is not None
        assert new.is_alive and new.worker_pid
    finally:
        new.stop()
        old.stop()


def test_a_port_that_is_taken_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another cluster's router, say: HAProxy itself would share the port without a word."""
    monkeypatch.setattr(routers, "_PATIENCE", 0.2)
    where = place(tmp_path)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((where.host, where.port))
        other.listen()
        with pytest.raises(RouterError, match=f"cannot listen on 127.0.0.1:{where.port}: Address already in use"):
            Router(where, {}).start([])
