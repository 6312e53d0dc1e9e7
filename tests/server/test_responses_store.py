"""The store of finished responses: bounded by count and by bytes, and held once where conversations share."""

from __future__ import annotations

from array import array
from dataclasses import replace

import orjson
from hypothesis import given
from hypothesis import strategies as st

from bequest.server.stores.responses import ResponseStore, StoredResponse, Turn

LARGE = 2**40


def response(
    number: int, parent: StoredResponse | None = None, tenant: str = "t", name: str | None = None, chars: int = 0
) -> StoredResponse:
    items = orjson.dumps([{"id": f"in{number}", "text": "x" * chars}, {"id": f"out{number}"}])
    turn = Turn(f"resp_{number}", None if parent is None else parent.turn, items, 1, (f"out{number}",))
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


def test_who_refers_to_an_item_uses_its_response() -> None:
    """As clients do that keep ids of items alone."""
    store = ResponseStore(2, LARGE)
    for number in range(2):
        store.put(response(number))
    assert store.turn_of("t", "out0") is not None
    store.put(response(2))
    assert store.turn_of("t", "out0") is not None and store.turn_of("t", "out1") is None


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
    store.restore([response(2, chars=30_000)])
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


def test_what_was_said_is_found_while_its_turn_is_held() -> None:
    store = ResponseStore(2, LARGE)
    first = response(1)
    again = replace(response(1), id="resp_9")  # whose turn came from a file once more
    child = response(2, first)
    for entry in (first, child, again):
        store.put(entry)
    assert (turn := store.turn_of("t", "out2")) is child.turn and turn.said_items() == {"out2": {"id": "out2"}}
    assert store.turn_of("t", "out1") is again.turn and store.turn_of("t", "in1") is None
    assert store.turn_of("other", "out1") is None
    store.put(response(3))
    store.put(response(4))
    assert store.turn_of("t", "out1") is None and store.turn_of("t", "out2") is None
    assert store.turn_of("t", "out4") is not None


def test_what_is_counted_is_taken_off_though_a_text_grows() -> None:
    """Python keeps the UTF-8 of a text that somebody wrote as JSON."""
    store = ResponseStore(10, LARGE)
    text = "".join(["wör", "ld"])
    store.put(replace(response(1), prompt_text=text))
    size = store.size
    orjson.dumps(text)
    assert store.size == size
    store.put(response(2))
    store.delete("t", "resp_1")
    assert store.size == held_bytes([entry for entry in [store.get("t", "resp_2")] if entry is not None])


def test_long_conversations_do_not_recurse() -> None:
    store = ResponseStore(10, LARGE)
    last = response(0)
    for number in range(1, 5000):
        last = response(number % 7, last)
    store.put(last)
    assert len(last.turn.all_items()) == 10_000
    store.delete("t", last.id)
    assert store.size == 0


def test_a_tenant_with_many_loses_its_own_first() -> None:
    store = ResponseStore(10, LARGE)
    for number in range(3):
        store.put(response(number, tenant="quiet"))
    for number in range(100):
        store.put(response(number, tenant="busy"))
    assert all(store.get("quiet", f"resp_{number}") for number in range(3)) and len(store) == 10
    assert [number for number in range(100) if store.get("busy", f"resp_{number}")] == list(range(93, 100))


def test_room_is_shared_equally_where_all_want_it() -> None:
    store = ResponseStore(9, LARGE)
    for number in range(9):
        store.put(response(number, tenant="first"))
    for number in range(30):
        store.put(response(number, tenant=f"later{number % 2}"))
    kept = [
        sum(store.get(tenant, f"resp_{n}") is not None for n in range(30)) for tenant in ("first", "later0", "later1")
    ]
    assert kept == [3, 3, 3]
    assert store.get("first", "resp_8") is not None, "the oldest left"


def test_bytes_are_shared_too() -> None:
    store = ResponseStore(1000, 100_000)
    store.put(response(1, tenant="quiet", chars=10_000))
    for number in range(50):
        store.put(response(number, tenant="busy", chars=20_000))
    assert store.get("quiet", "resp_1") is not None and store.get("busy", "resp_49") is not None
    assert store.size <= 100_000


def test_of_equal_tenants_the_one_not_heard_of_for_longest_gives_way() -> None:
    store = ResponseStore(2, LARGE)
    for tenant in ("a", "b"):
        store.put(response(1, tenant=tenant))
    assert store.get("a", "resp_1") is not None
    store.put(response(1, tenant="c"))
    assert store.get("b", "resp_1") is None and store.get("a", "resp_1") and store.get("c", "resp_1")


@given(
    st.lists(
        st.tuples(st.sampled_from("tuv"), st.integers(0, 12), st.sampled_from(["put", "get", "delete"])), max_size=60
    ),
    st.integers(1, 6),
)
def test_the_size_is_what_is_held(steps: list[tuple[str, int, str]], most: int) -> None:
    """Random histories of a store of few entries, against a count from scratch."""
    store = ResponseStore(most, 6000)
    made: dict[str, list[StoredResponse]] = {tenant: [] for tenant in "tuv"}
    for number, (tenant, parent, what) in enumerate(steps):
        own = made[tenant]
        if what == "put":
            begun = own[parent] if parent < len(own) else None
            own.append(response(number, begun, tenant, chars=10 * parent))
            store.put(own[-1])
        elif parent < len(own):
            (store.get if what == "get" else store.delete)(tenant, own[parent].id)
        shelves = store._shelves
        kept = [entry for t in made if t in shelves for entry in made[t] if entry.id in shelves[t].entries]
        assert store.size == held_bytes(kept) <= 6000 and len(store) == len(kept) <= most
