"""Adapters over HTTP: a model's name, lists, loads and unloads, keys, and children of another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from bequest.engine.config import ServerConfig
from bequest.engine.errors import (
    ContinuationMismatch,
    EngineError,
    ModelError,
    ParentExpired,
    ParentFailed,
    ParentLost,
    ParentNotFound,
)
from bequest.engine.types.adapter import AdapterRef
from bequest.engine.watching.observation import AdapterLoad, EngineLoad
from tests.server.conftest import Starter
from tests.server.fakes import FakeEngine
from tests.server.front import Front
from tests.server.test_batches import created, ended, jsonl, line, output
from tests.server.test_keys import bearer, key_file

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/hidden_states": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
}
LEGAL, MEDICAL = AdapterRef("legal", 7, "d7", 1.7e9), AdapterRef("medical", 8, "d8")


@pytest.fixture
async def front(start: Starter) -> Front:
    front: Front = await start()
    front.engine.adapters.loaded = {"legal": LEGAL, "medical": MEDICAL}
    return front


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_names_an_adapter_as_its_model(front: Front, path: str) -> None:
    answer, content = await front.post(path, {**BODIES[path], "model": "legal"})
    assert answer.status == 200 and content["model"] == "legal"
    answer, content = await front.post(path, BODIES[path])
    assert content["model"] == "fake/model"
    assert [request.adapter for request in front.engine.submitted] == [LEGAL, None]


async def test_the_list_of_models_has_their_parents(front: Front) -> None:
    _, content = await front.get("/v1/models")
    assert [(m["id"], m["root"], m["parent"]) for m in content["data"]] == [
        ("fake/model", "fake/model", None),
        ("legal", "legal", "fake/model"),
        ("medical", "medical", "fake/model"),
    ]
    _, content = await front.get("/v1/models/legal")
    assert content["parent"] == "fake/model"
    assert (content["created"], content["created_at"]) == (1_700_000_000, "2023-11-14T22:13:20+00:00")
    _, content = await front.get("/v1/models/fake/model")
    assert content["created"] == front.context.started
    answer, content = await front.get("/v1/models/other")
    assert (answer.status, content["error"]["code"]) == (404, "model_not_found")


async def test_metrics_say_which_adapters_requests_need(front: Front) -> None:
    async def gauges() -> dict[str, float]:
        async with front.http.get(front.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        told = (line.rsplit(" ", 1) for line in lines if line.startswith(("vllm:lora", "bequest:adapters")))
        return {name: float(value) for name, value in told}

    front.metrics.load = lambda: EngineLoad(0, 0, 0, 0, adapters=AdapterLoad(0, 64, (), ()))
    assert await gauges() == {'bequest:adapters{model_name="fake/model"}': 0}
    busy = AdapterLoad(loaded=3, at_once=2, running=("legal", "medical"), waiting=("legal",))
    front.metrics.load = lambda: EngineLoad(0, 0, 0, 0, adapters=busy)
    before = time.time()
    found = await gauges()
    assert found.pop('bequest:adapters{model_name="fake/model"}') == 3
    [(name, when)] = found.items()
    assert name == (
        'vllm:lora_requests_info{max_lora="2",model_name="fake/model",running_lora_adapters="legal,medical",'
        'waiting_lora_adapters="legal"}'
    )
    assert before <= when <= time.time()


async def test_a_model_that_is_not_there(front: Front) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await front.client().completions.create(model="lega", prompt="x")
    assert caught.value.code == "model_not_found"
    assert "'fake/model', 'legal', 'medical'" in str(caught.value), "what a slip of the pen meant"


async def parent(front: Front, **fields: Any) -> str:
    _, content = await front.post(COMPLETIONS, {"prompt": "abc", "max_tokens": 2, **fields})
    return str(content["id"])


async def test_a_child_has_its_parents_adapter(front: Front) -> None:
    of_legal, of_none = await parent(front, model="legal"), await parent(front)
    for reference, model, adapter in ((of_legal, "legal", LEGAL), (of_legal, None, LEGAL), (of_none, None, None)):
        body = {"continuation_of": reference, "prompt": "d", "max_tokens": 1, "model": model}
        answer, content = await front.post(COMPLETIONS, body)
        assert answer.status == 200, content
        assert content["model"] == ("fake/model" if adapter is None else adapter.name)
        assert front.engine.submitted[-1].adapter == adapter


@pytest.mark.parametrize("gone", [ParentExpired, ParentFailed, ParentLost])
async def test_a_fallback_has_the_adapter_of_a_parent_that_is_gone(
    front: Front, monkeypatch: pytest.MonkeyPatch, gone: type[EngineError]
) -> None:
    """And one whose adapter is gone with it does not get the model's own answer."""
    monkeypatch.setattr(front.engine, "parent", raises(gone("gone", reason="parent_expired", adapter="legal")))
    body = {"continuation_of": "gone", "prompt": "d", "continuation_fallback": "abcd", "max_tokens": 1}
    answer, content = await front.post(COMPLETIONS, body)
    assert (answer.status, content["model"]) == (200, "legal"), content
    assert front.engine.submitted[-1].adapter == LEGAL
    del front.engine.adapters.loaded["legal"]
    answer, content = await front.post(COMPLETIONS, body)
    assert (answer.status, content["error"]["code"]) == (404, "model_not_found") and "'legal'" in str(content)
    assert (await front.post(COMPLETIONS, body | {"model": "fake/model"}))[0].status == 200


def raises(error: EngineError) -> Callable[..., None]:
    def raising(*_: object) -> None:
        raise error

    return raising


async def test_a_parent_that_is_found_in_a_store_brings_its_adapter(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server has written it: it is looked for before the child's model is chosen."""
    reference = await parent(front, model="legal")
    records = front.engine
    stored = {key: records.found.pop(key) for key in [key for key in records.found if key[1] == reference]}

    async def seek(tenant: str, wanted: str) -> None:
        if wanted == reference:
            records.found.update(stored)

    monkeypatch.setattr(front.engine, "seek", seek)
    answer, content = await front.post(COMPLETIONS, {"continuation_of": reference, "prompt": "d", "max_tokens": 1})
    assert (answer.status, content["model"]) == (200, "legal"), content


@pytest.mark.parametrize("first, second", [("legal", "medical"), ("legal", "fake/model"), ("fake/model", "legal")])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/hidden_states"])
async def test_a_child_of_another_one_is_refused(front: Front, first: str, second: str, path: str) -> None:
    reference = await parent(front, model=first)
    answer, content = await front.post(path, {"continuation_of": reference, "model": second})
    error = content["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "continuation_mismatch", "model")
    assert second in error["message"] or "the model itself" in error["message"]


async def test_what_is_retained_names_its_adapter(front: Front) -> None:
    reference = await parent(front, model="legal", retain=True)
    _, entry = await front.get(f"/v1/continuations/{reference}")
    assert entry["adapter"] == "legal"


async def test_a_response_has_its_parents_adapter(front: Front) -> None:
    _, content = await front.post("/v1/responses", {"input": "a", "model": "legal"})
    follow = {"input": "b", "previous_response_id": content["id"]}
    answer, child = await front.post("/v1/responses", follow)
    assert (answer.status, child["model"], front.engine.submitted[-1].adapter) == (200, "legal", LEGAL)
    answer, refused = await front.post("/v1/responses", {**follow, "model": "medical"})
    assert (answer.status, refused["error"]["code"]) == (400, "continuation_mismatch")


async def test_a_response_of_an_adapter_that_was_loaded_again_is_text(front: Front) -> None:
    _, content = await front.post("/v1/responses", {"input": "a", "model": "legal"})
    front.engine.adapters.loaded["legal"] = AdapterRef("legal", 9, "d9")
    follow = {"input": "b", "previous_response_id": content["id"], "model": "legal"}
    answer, child = await front.post("/v1/responses", follow)
    assert answer.status == 200, child
    lineage = front.engine.submitted[-1].terms.lineage
    assert lineage is not None and lineage.at == 0


async def test_what_the_engine_says_of_another_adapter(front: Front) -> None:
    front.engine.refusal = ContinuationMismatch("…", reason="other_adapter", field="adapter", parent="cmpl-1")
    answer, content = await front.post(COMPLETIONS, {"prompt": "abc"})
    assert (answer.status, content["error"]["param"]) == (400, "model")
    assert "cmpl-1" in content["error"]["message"]


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def loading(start: Starter, tmp_path: Path) -> Front:
    (tmp_path / "folder" / "legal").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "outside")
    front: Front = await start(allow_lora_loading=str(tmp_path / "folder"))
    return front


async def test_an_adapter_is_loaded_and_unloaded(loading: Front, tmp_path: Path) -> None:
    for path in ("legal", str(tmp_path / "folder" / "legal"), "x/../legal"):
        answer, content = await loading.post(LOAD, {"lora_name": "legal", "lora_path": path})
        assert (answer.status, content["id"], content["parent"]) == (200, "legal", "fake/model")
        assert loading.engine.adapters.directories[-1] == (tmp_path / "folder" / "legal").resolve()
        answer, content = await loading.post(UNLOAD, {"lora_name": "legal"})
        assert (answer.status, content) == (200, {"id": "legal", "object": "model", "deleted": True})
    answer, content = await loading.post(UNLOAD, {"lora_name": "legal"})
    assert (answer.status, content["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "path", ["..", "../outside", "/etc", "link", "legal/../../outside", ".", "a\0b", "~/x/../../.."]
)
async def test_a_path_outside_of_the_folder_is_not_looked_at(loading: Front, path: str, tmp_path: Path) -> None:
    answer, content = await loading.post(LOAD, {"lora_name": "x", "lora_path": path})
    if path.startswith("~"):  # no shell reads it: a folder of this name
        assert answer.status == 400
        return
    error = content["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "invalid_adapter", "lora_path")
    assert not loading.engine.adapters.directories and str(tmp_path) not in error["message"]


async def test_an_adapter_takes_the_place_of_another(loading: Front) -> None:
    body = {"lora_name": "legal", "lora_path": "legal"}
    assert (await loading.post(LOAD, body | {"load_inplace": True}))[0].status == 200  # of nothing
    answer, content = await loading.post(LOAD, body)
    assert (answer.status, content["error"]["param"]) == (400, "lora_name")
    answer, content = await loading.post(LOAD, body | {"load_inplace": True})
    assert (answer.status, content["id"]) == (200, "legal") and len(loading.engine.adapters.directories) == 2
    loading.engine.adapters.used = {"legal"}
    answer, content = await loading.post(LOAD, body | {"load_inplace": True})
    assert (answer.status, content["error"]["code"]) == (409, "adapter_in_use")
    answer, content = await loading.post(LOAD, body | {"load_inplace": "yes"})
    assert (answer.status, content["error"]["param"]) == (400, "load_inplace")


async def test_what_cannot_be_loaded(loading: Front) -> None:
    for body, code, param in (
        ({"lora_path": "legal"}, "missing_required_parameter", "lora_name"),
        ({"lora_name": "x"}, "missing_required_parameter", "lora_path"),
        ({"lora_name": "fake/model", "lora_path": "legal"}, "invalid_adapter", "lora_name"),
        ({"lora_name": "x", "lora_path": "missing"}, "invalid_adapter", "lora_path"),
        ({"lora_name": 5, "lora_path": "legal"}, "invalid_type", "lora_name"),
    ):
        answer, content = await loading.post(LOAD, body)
        assert (answer.status, content["error"]["code"], content["error"]["param"]) == (400, code, param)


async def test_an_adapter_that_is_needed_is_not_unloaded(loading: Front) -> None:
    loading.engine.adapters.loaded["legal"], loading.engine.adapters.used = LEGAL, {"legal"}
    answer, content = await loading.post(UNLOAD, {"lora_name": "legal"})
    error = content["error"]
    assert (answer.status, error["code"], error["details"]) == (409, "adapter_in_use", {"leases": ["cmpl-1"]})
    assert "cmpl-1" in error["message"] and answer.headers["x-should-retry"] == "false"


async def test_without_the_flag_nothing_is_loaded(front: Front) -> None:
    for path in (LOAD, UNLOAD):
        answer, content = await front.post(path, {"lora_name": "legal", "lora_path": "x"})
        assert (answer.status, content["error"]["code"]) == (403, "permission_denied")
        assert "--allow-lora-loading" in content["error"]["message"]


def test_the_folder_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"allow_lora_loading must be a folder that exists, not '.*nowhere'"):
        ServerConfig(allow_lora_loading=str(tmp_path / "nowhere"))


# --- keys ------------------------------------------------------------------------------------------------------------

KEYS = """
[[keys]]
name = "lawyer"
key = "l"
adapters = ["legal"]
[[keys]]
name = "guest"
key = "g"
adapters = []
[[keys]]
name = "boss"
key = "b"
operator = true
"""


async def test_a_key_names_its_own_adapters_alone(start: Starter, tmp_path: Path) -> None:
    front = await start(api_key_file=key_file(tmp_path, KEYS), allow_lora_loading=str(tmp_path))
    front.engine.adapters.loaded = {"legal": LEGAL, "medical": MEDICAL}
    for key, names in (("l", ["legal"]), ("g", []), ("b", ["legal", "medical"])):
        _, content = await front.get("/v1/models", headers=bearer(key))
        assert [m["id"] for m in content["data"]] == ["fake/model", *names]
        for name in ("legal", "medical", "fake/model"):
            allowed = name in (*names, "fake/model")
            answer, content = await front.post(COMPLETIONS, {"prompt": "a", "model": name}, headers=bearer(key))
            assert answer.status == (200 if allowed else 404), content
            answer, _ = await front.get(f"/v1/models/{name}", headers=bearer(key))
            assert answer.status == (200 if allowed else 404)
            for path in ("/tokenize", "/api/show"):
                answer, content = await front.post(path, {"prompt": "a", "model": name}, headers=bearer(key))
                assert answer.status == (200 if allowed else 404), "nothing tells that it is here"
        answer, content = await front.post(COMPLETIONS, {"prompt": "a", "model": "lega"}, headers=bearer(key))
        assert [name for name in ("legal", "medical") if f"'{name}'" in content["error"]["message"]] == names
        answer, _ = await front.post(UNLOAD, {"lora_name": "none"}, headers=bearer(key))
        assert answer.status == (404 if key == "b" else 403)


async def test_a_child_is_no_way_to_another_keys_adapter(
    start: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same tenant, whose records both keys see."""
    front = await start(
        api_key_file=key_file(tmp_path, KEYS.replace('name = "guest"', 'name = "guest"\ntenant = "boss"'))
    )
    front.engine.adapters.loaded = {"legal": LEGAL}
    _, content = await front.post(COMPLETIONS, {"prompt": "a", "model": "legal"}, headers=bearer("b"))
    child = {"continuation_of": content["id"], "prompt": "b"}
    for body in (child, {**child, "model": "legal"}):
        answer, content = await front.post(COMPLETIONS, body, headers=bearer("g"))
        assert (answer.status, content["error"]["code"]) == (404, "model_not_found")
    found, calls = front.engine.parent, iter(range(9))

    def known_later(tenant: str, reference: str) -> Any:
        if next(calls) == 0:
            raise ParentNotFound("It waits for its own parent.")
        return found(tenant, reference)

    monkeypatch.setattr(front.engine, "parent", known_later)
    answer, content = await front.post(COMPLETIONS, child, headers=bearer("g"))
    assert (answer.status, content["error"]["code"]) == (400, "continuation_mismatch")
    answer, content = await front.post(COMPLETIONS, child, headers=bearer("b"))
    assert (answer.status, content["model"]) == (200, "legal")


async def test_a_key_file_with_wrong_adapters(start: Starter, tmp_path: Path) -> None:
    text = '[[keys]]\nname = "one"\nkey = "k"\nadapters = "legal"\n'
    with pytest.raises(ValueError, match=r"keys\[0\]\.adapters must be a list of names of adapters"):
        await start(api_key_file=key_file(tmp_path, text))


async def test_an_adapter_cannot_have_the_models_name(start: Starter) -> None:
    engine = FakeEngine()
    engine.adapters.loaded = {"fake/model": AdapterRef("fake/model", 1, "d")}
    with pytest.raises(ModelError, match="the model itself has this name"):
        await start(engine)


async def test_a_line_of_a_batch_has_its_parents_adapter(start: Starter, tmp_path: Path) -> None:
    """Where it names no model, as any request."""
    front: Front = await start(files_dir=str(tmp_path))
    front.engine.adapters.loaded = {"legal": LEGAL}
    _, parent = await front.post(COMPLETIONS, {**BODIES[COMPLETIONS], "model": "legal"})
    data = jsonl([line("1", {"continuation_of": parent["id"], "prompt": "d"}, COMPLETIONS)])
    client = front.client()
    batch = await ended(client, await created(client, data, COMPLETIONS))
    told = (await output(client, batch.output_file_id))["1"]["response"]
    assert told["body"]["model"] == "legal" and front.engine.submitted[-1].adapter == LEGAL
