"""The store of finished responses: bounded by count and by bytes, and held once where conversations share."""

from __future__ import annotations

from array import array

import orjson
from hypothesis import given
from hypothesis import strategies as st

from server.responses.store import ResponseStore, StoredResponse, Turn

LARGE = 2**40


def response(
    number: int, parent: StoredResponse | None = None, tenant: str = "t", name: str | None = None, chars: int = 0
) -> StoredResponse:
    items = orjson.dumps([{"id": f"in{number}", "text": "x" * chars}, {"id": f"out{number}"}])
    turn = Turn(None if parent is None else parent.turn, items, 1)
    numbers = array("i", range(number))
    return StoredResponse(f"resp_{number}", name, tenant, b"{}", turn, numbers, 0, "", "", array("I"))


def held_bytes(kept: list[StoredResponse]) -> int:
    """What the store should say: every response, and every turn that any of them leads to, once."""
    turns: dict[int, Turn] = {}
    for entry in kept:
        turn: Turn | None = entry.turn
        while turn is not None:
            turns[id(turn)] = turn
            turn = turn.parent
    return sum(entry.size for entry in kept) + sum(len(turn.items) for turn in turns.values())


def test_the_least_recently_used_leaves_first() -> None:
    store = ResponseStore(3, LARGE)
    for number in range(3):
        store.put(response(number))
    assert store.get("t", "resp_0") is not None
    store.put(response(3))
    assert store.get("t", "resp_1") is None and len(store) == 3
    assert all(store.get("t", f"resp_{number}") for number in (0, 2, 3))


def test_nothing_is_kept_where_nothing_may_be() -> None:
    for store in (ResponseStore(0, LARGE), ResponseStore(10, 0)):
        store.put(response(1))
        assert len(store) == 0 and store.size == 0


def test_bytes_are_bounded() -> None:
    one = held_bytes([response(1, chars=10_000)])
    store = ResponseStore(100, 3 * one)
    for number in range(1, 11):
        store.put(response(number, chars=10_000))
        assert store.size <= 3 * one
    assert len(store) == 2 or len(store) == 3
    assert store.get("t", "resp_10") is not None and store.get("t", "resp_1") is None


def test_one_that_needs_all_the_room_leaves_the_others_alone() -> None:
    store = ResponseStore(100, 20_000)
    store.put(response(1))
    before = store.size
    store.put(response(2, chars=30_000))
    assert store.get("t", "resp_2") is None and store.get("t", "resp_1") is not None and store.size == before


def test_tenants_and_names() -> None:
    store = ResponseStore(10, LARGE)
    store.put(response(1, name="mine"))
    store.put(response(2, tenant="other", name="mine"))
    assert store.get("other", "resp_1") is None and store.delete("other", "resp_1") is None
    assert store.get("t", "mine") is store.get("t", "resp_1") is not None
    store.put(response(3, name="mine"))
    assert (youngest := store.get("t", "mine")) is not None and youngest.id == "resp_3"
    store.delete("t", "resp_1")
    assert store.get("t", "mine") is youngest, "the name is another's by now"
    store.delete("t", "mine")
    assert store.get("t", "mine") is None and store.get("other", "mine") is not None


def test_a_conversation_outlives_its_first_turns() -> None:
    store = ResponseStore(1, LARGE)
    first = response(1)
    second = response(2, first)
    third = response(3, second)
    for entry in (first, second, third):
        store.put(entry)
    assert len(store) == 1 and store.size == held_bytes([third])
    assert [item["id"] for item in third.turn.input_items()] == ["in1", "out1", "in2", "out2", "in3"]
    assert [item["id"] for item in third.turn.all_items()][-1] == "out3"
    store.delete("t", "resp_3")
    assert store.size == 0 and third.turn.holders == first.turn.holders == 0


def test_long_conversations_do_not_recurse() -> None:
    store = ResponseStore(10, LARGE)
    last = response(0)
    for number in range(1, 5000):
        last = response(number % 7, last)
    store.put(last)
    assert len(last.turn.all_items()) == 10_000
    store.delete("t", last.id)
    assert store.size == 0


@given(
    st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["put", "get", "delete"])), max_size=60), st.integers(1, 6)
)
def test_the_size_is_what_is_held(steps: list[tuple[int, str]], most: int) -> None:
    """Random histories of a store of few entries, against a count from scratch."""
    store = ResponseStore(most, 6000)
    made: list[StoredResponse] = []
    for number, (parent, what) in enumerate(steps):
        if what == "put":
            made.append(response(number, made[parent] if parent < len(made) else None, chars=10 * parent))
            store.put(made[-1])
        elif parent < len(made):
            (store.get if what == "get" else store.delete)("t", made[parent].id)
        kept = [entry for entry in made if ("t", entry.id) in store._entries]
        assert store.size == held_bytes(kept) <= 6000 and len(store) == len(kept) <= most
