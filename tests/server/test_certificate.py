"""HTTPS: the whole server over TLS, certificates that change while it runs, and files that are none."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from bequest.engine.config import ServerConfig
from bequest.server.process import certificate
from bequest.server.process.certificate import Certificate
from tests.server.fakes import PIECES
from tests.server.test_serve import Process

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def make(folder: Path, name: str) -> tuple[str, str]:
    """A certificate for `name` and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subject = ["-subj", f"/CN={name}", "-days", "2", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *subject, "-out", cert, "-keyout", key], check=True, capture_output=True)
    return str(cert), str(key)


async def name_of(url: str) -> str:
    """That the server's certificate has."""
    port = int(url.rpartition(":")[2])
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return "one" if b"\x03one" in shown else "two" if b"\x03two" in shown else "?"


async def url_of(process: Process) -> str:
    """The tests' own pattern knows http alone."""
    for _ in range(2000):
        if "ready on https://" in process._caplog.text:
            return process._caplog.text.split("ready on ")[1].split()[0]
        await asyncio.sleep(0.001)
    raise AssertionError(process._caplog.text)


async def test_everything_over_tls(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    cert, key = make(tmp_path, "one")
    process = Process(caplog, ssl_certfile=cert, ssl_keyfile=key)
    url = await url_of(process)
    process.engine.held = False
    trusted = ssl.create_default_context(cafile=cert)
    body = {"prompt": "a", "stream": True}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as session:
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 200
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200 and text.endswith("data: [DONE]\n\n") and PIECES[0] in text
        async with session.post(f"{url}/v1/completions", data=b"x" * 100) as answer:
            assert answer.status == 415
        process.engine.held = True
        leaving = asyncio.create_task(session.post(f"{url}/v1/completions", json={"prompt": "a"}))
        await process.running(1)
        leaving.cancel()
        await process.running(0)
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(url.replace("https", "http"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 0


async def test_a_certificate_that_changes(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate, "_LOOK", 0.02)
    cert, key = make(tmp_path, "one")
    process = Process(caplog, ssl_certfile=cert, ssl_keyfile=key)
    url = await url_of(process)
    assert await name_of(url) == "one"
    (tmp_path / "cert.pem").write_text("half a file")
    for _ in range(500):
        if "the certificate stays as it was" in caplog.text:
            break
        await asyncio.sleep(0.01)
    assert await name_of(url) == "one"
    make(tmp_path, "two")
    for _ in range(500):
        if await name_of(url) == "two":
            break
        await asyncio.sleep(0.01)
    assert await name_of(url) == "two"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 0


async def test_sighup_reads_it_again(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    cert, key = make(tmp_path, "one")
    process = Process(caplog, ssl_certfile=cert, ssl_keyfile=key)
    url = await url_of(process)
    make(tmp_path, "two")
    assert await name_of(url) == "one"
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0.01)
    assert await name_of(url) == "two" and "the certificate was read again" in caplog.text
    os.kill(os.getpid(), signal.SIGTERM)
    assert await process.ended == 0


async def test_files_that_are_none(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    cert, _ = make(tmp_path, "one")
    other = tmp_path / "other"
    other.mkdir()
    _, key = make(other, "two")
    for given in ((cert, key), (cert, None), (key, key)):
        with pytest.raises(OSError, match=r"--ssl-certfile .*belong together"):
            Certificate(*given)
    with pytest.raises(OSError, match="No such file"):
        Certificate(str(tmp_path / "nothing"), None)
    both = tmp_path / "both.pem"
    make(tmp_path, "one")
    both.write_text((tmp_path / "cert.pem").read_text() + (tmp_path / "key.pem").read_text())
    assert Certificate(str(both), None).context
    process = Process(caplog, ssl_certfile="nowhere.pem")
    assert await process.ended == 1 and "--ssl-certfile nowhere.pem" in caplog.text
    with pytest.raises(ValueError, match="ssl_keyfile needs ssl_certfile"):
        ServerConfig(ssl_keyfile=key)
