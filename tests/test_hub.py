"""Models by name, with the hub's own client library and a hub on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from bequest.engine.errors import ModelError
from bequest.engine.fetch import model_path, served_name
from bequest.engine.hub.choice import choose, quantisation
from bequest.engine.hub.client import Hub
from bequest.engine.hub.names import HubName, parse_name
from bequest.engine.models.look import look_at
from tests import hub as local
from tests.tiny_models import save_tiny_model

TINY = HubName("acme/tiny")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return local.files_of(save_tiny_model("llama", tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[local.Hub]:
    extra = {"README.md": b"#", "pytorch_model.bin": b"\0" * 5000, "original/model.safetensors": b"\0" * 5000}
    quants = {"tiny-Q4_K_M.gguf": b"GGUF" + b"\0" * 4000, "tiny-Q8_0.gguf": b"GGUF"}
    server = local.Hub({"acme/tiny": files | extra, "acme/tiny-gguf": quants, "acme/odd": {"config.json": b"{}"}})
    yield server
    server.close()


@pytest.fixture
def hub(server: local.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return Hub(server.url, tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("acme/tiny", HubName("acme/tiny")),
        ("acme/tiny@v1.0", HubName("acme/tiny", "v1.0")),
        ("acme/tiny@refs/pr/1", HubName("acme/tiny", "refs/pr/1")),
        ("acme/tiny:Q4_K_M", HubName("acme/tiny", None, "Q4_K_M")),
        ("acme/tiny@main:sub/a.gguf", HubName("acme/tiny", "main", "sub/a.gguf")),
        ("acme/tiny:Q4_K_M@main", HubName("acme/tiny", "main", "Q4_K_M")),
        ("tiny", None),
        ("./tiny", None),
        ("../models/tiny", None),
        ("/models/tiny", None),
        ("a/b/c", None),
        ("acme/tiny@", None),
        ("acme/tiny@a:b@c", None),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert parse_name(text) == name


def test_only_what_is_needed_is_fetched_once(hub: Hub, server: local.Hub, files: dict[str, bytes]) -> None:
    path = hub.fetch(TINY)
    assert look_at(path).config is not None and (path / "model.safetensors").read_bytes() == files["model.safetensors"]
    fetched = server.fetched()
    assert "model.safetensors" in fetched and not {"README.md", "pytorch_model.bin"} & set(fetched)
    assert fetched.count("model.safetensors") == 1, "not the one of original/"
    server.requests.clear()
    assert hub.fetch(TINY) == path and not server.fetched()


def test_what_is_kept_is_served_without_the_hub(
    hub: Hub, server: local.Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = hub.fetch(TINY)
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetch(TINY) == path and not server.requests
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set") as error:
        hub.fetch(HubName("acme/other"))
    assert str(hub.folder) in str(error.value) and "tried" in str(error.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.close()
    assert Hub("http://127.0.0.1:1", hub.cache).fetch(TINY) == path
    with pytest.raises(ModelError, match="cannot be reached"):
        Hub("http://127.0.0.1:1", hub.cache).fetch(HubName("acme/other"))


def test_a_broken_download_is_resumed(
    hub: Hub, server: local.Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.breaks = 1
    path = hub.fetch(TINY)
    assert (path / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert any(asked for _, _, asked in server.requests), server.requests


def test_a_download_that_breaks_again_and_again(hub: Hub, server: local.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.breaks = 1000
    with pytest.raises(ModelError, match="the same command goes on from there"):
        hub.fetch(TINY)
    server.breaks = 0
    assert look_at(hub.fetch(TINY)).config is not None


def test_gguf_by_quantisation_and_by_file(hub: Hub, server: local.Hub) -> None:
    path = hub.fetch(HubName("acme/tiny-gguf", None, "q4_k_m"))
    assert path.name == "tiny-Q4_K_M.gguf" and path.stat().st_size == 4004
    assert server.fetched() == ["tiny-Q4_K_M.gguf"]
    assert hub.fetch(HubName("acme/tiny-gguf", None, "tiny-Q8_0.gguf")).name == "tiny-Q8_0.gguf"
    with pytest.raises(ModelError, match="name one of them: acme/tiny-gguf:Q4_K_M, acme/tiny-gguf:Q8_0"):
        hub.fetch(HubName("acme/tiny-gguf"))
    with pytest.raises(ModelError, match="has no GGUF file Q2_K; it has"):
        hub.fetch(HubName("acme/tiny-gguf", None, "Q2_K"))


def test_revisions(hub: Hub, server: local.Hub) -> None:
    assert hub.fetch(HubName("acme/tiny", server.commit("acme/tiny"))).is_dir()
    with pytest.raises(ModelError, match="has no revision v9"):
        hub.fetch(HubName("acme/tiny", "v9"))


def test_names_that_are_not_there(hub: Hub, server: local.Hub) -> None:
    with pytest.raises(ModelError, match="no such model, or it is private") as error:
        hub.fetch(HubName("acme/nothing"))
    assert "tried: the path" in str(error.value) and f"{server.url}/acme/nothing" in str(error.value)


def test_licences_and_tokens(hub: Hub, server: local.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.gated.add("acme/tiny")
    with pytest.raises(ModelError, match=r"asks for a licence: accept it on .*HF_TOKEN"):
        hub.fetch(TINY)
    server.rejects_token = True
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ModelError, match=r"answered 401.*HF_TOKEN"):
        hub.fetch(TINY)


def test_a_model_that_cannot_be_served_is_refused_before_its_weights(hub: Hub, server: local.Hub) -> None:
    server.repositories["acme/odd"] |= {"model.safetensors": b"\0" * 9999, "tokenizer.json": b"{}"}
    with pytest.raises(ModelError, match="not supported"):
        hub.fetch(HubName("acme/odd"))
    assert "model.safetensors" not in server.fetched()


def test_a_full_disk(hub: Hub, server: local.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 28))
    with pytest.raises(ModelError, match=r"needs .* more, and .* free: make room there"):
        hub.fetch(TINY)
    assert "model.safetensors" not in server.fetched()


def test_a_hub_that_is_down(hub: Hub, server: local.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.broken = True
    with pytest.raises(ModelError, match=r"cannot be reached, and .* does not hold it"):
        hub.fetch(TINY)


def test_paths_come_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_path("acme/tiny") == Path("acme/tiny")
    assert served_name("acme/tiny", Path("acme/tiny")) == "tiny"
    assert served_name("acme/other@v1", Path("/cache/snapshots/abc")) == "acme/other"
    assert served_name("acme/other:Q4_K_M", Path("/cache/other-Q4_K_M.gguf")) == "acme/other:Q4_K_M"
    with pytest.raises(ModelError, match="no such file or directory; a model is"):
        model_path("./acme/other")


def test_what_is_chosen() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    listed = ["config.json", "model.safetensors.index.json", *shards, "consolidated.safetensors", "tokenizer.json"]
    assert choose(TINY, listed).weights == tuple(shards)
    assert choose(TINY, ["config.json", "model.gguf"]).gguf == "model.gguf"
    for names, said in (
        (["config.json", "pytorch_model.bin"], "only pickled weights"),
        (["adapter_config.json"], "adapter"),
        (["README.md"], "holds no model"),
        (["a-Q8_0-00001-of-00002.gguf"], "one part of several"),
    ):
        with pytest.raises(ModelError, match=said):
            choose(TINY, names)
    assert [quantisation(f"x/Tiny-{end}.gguf") for end in ("Q4_K_M", "IQ2_XXS", "BF16", "v2")] == [
        "Q4_K_M",
        "IQ2_XXS",
        "BF16",
        "Tiny-v2",
    ]
