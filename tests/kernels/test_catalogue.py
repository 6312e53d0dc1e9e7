"""The prefix tree against a set of tuples, and sampling bound to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bequest.engine.kernels import cpu
from bequest.engine.kernels.catalogue import CatalogueRule, PlacedCatalogue
from bequest.engine.kernels.cpu_beams import constrain_row
from bequest.engine.runner.catalogues import PlacedCatalogues
from bequest.engine.scheduling.catalogue_handles import CatalogueHandles
from bequest.engine.scheduling.sampler_rows import row_spec
from bequest.engine.types import CatalogueSpec, Registration, Release, SamplingParams
from bequest.engine.types.catalogue import ROOT, Catalogue

V = 50
Item = tuple[int, ...]


def padded(items: Sequence[Item], width: int | None = None) -> np.ndarray:
    width = max(map(len, items)) if width is None else width
    return np.array([[*item, *(-1,) * (width - len(item))] for item in items], np.int32)


def ragged(items: Sequence[Item], vocab: int, threads: int) -> Catalogue:
    tokens = np.array([token for item in items for token in item], np.int32)
    offsets = np.cumsum([0, *map(len, items)], dtype=np.int64)
    return Catalogue.from_ragged(tokens, offsets, vocab, threads)


def check_tree(catalogue: Catalogue, items: set[Item]) -> None:
    """Every node, from the root down."""
    prefixes = {item[:n] for item in items for n in range(len(item) + 1)}
    assert catalogue.num_items == len(items) and catalogue.depth == max(map(len, items))
    nodes = {}
    for prefix in prefixes:
        node = catalogue.walk(prefix)
        assert node >= 0
        nodes[node] = prefix
        children = sorted({item[len(prefix)] for item in items if item[: len(prefix)] == prefix != item})
        assert catalogue.children(node).tolist() == children
        assert catalogue.is_terminal(node) == (prefix in items)
        for token in range(-1, V + 1):
            assert (catalogue.child(node, token) >= 0) == (token in children)
    assert sorted(nodes) == list(range(len(prefixes)))
    assert len(catalogue.tree.tokens) == len(prefixes)


item_lists = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), min_size=1, max_size=40)


@given(item_lists, st.integers(1, 3))
def test_equals_a_set_of_tuples(items: list[Item], threads: int) -> None:
    check_tree(Catalogue(padded(items), V, threads), set(items))
    check_tree(ragged(items, V, threads), set(items))


@pytest.mark.parametrize("items", [[(0,)], [(V - 1, 0, 3)], [(1,), (1, 1), (1, 1, 1)], [(3, 4)] * 5])
def test_small_trees(items: list[Item]) -> None:
    check_tree(Catalogue(padded(items), V), set(items))
    check_tree(Catalogue(padded(items, 6), V), set(items))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_large_tree(threads: int) -> None:
    """Large enough for its first level to be sorted in pieces."""
    items = np.random.default_rng(0).integers(0, 300, (1_200_000, 2), np.int32)
    catalogue = Catalogue(items, 300, threads)
    distinct = np.stack(np.divmod(np.unique(items[:, 0] * 300 + items[:, 1]), 300), 1)
    assert catalogue.num_items == len(distinct)
    assert (catalogue.tree.tokens[1:301] == np.arange(300)).all() and len(catalogue.children(ROOT)) == 300
    assert (catalogue.tree.tokens[301:] == distinct[:, 1]).all()
    counts = np.bincount(distinct[:, 0], minlength=300)
    assert (np.diff(catalogue.tree.first_child)[1:] == counts).all()
    assert catalogue.num_bytes <= items.nbytes


@pytest.mark.parametrize(
    "items",
    [[[-1, -1]], [[1, 2], [-1, 3]], [[1, 2], [1, V]], [[1, -2]], [[1, -1, 2]]],
)
def test_broken_items_are_errors(items: list[list[int]]) -> None:
    with pytest.raises(cpu.Error, match=f"item {len(items) - 1} "):
        Catalogue(np.array(items, np.int32), V)


def test_no_items_are_an_error() -> None:
    with pytest.raises(cpu.Error, match="no items"):
        Catalogue(np.empty((0, 3), np.int32), V)


def test_an_empty_ragged_item_is_an_error() -> None:
    with pytest.raises(cpu.Error, match="item 1 "):
        ragged([(1,), (), (2,)], V, 1)


@pytest.mark.parametrize("node", [-1, 4, 2**31 - 1])
def test_unknown_nodes_are_errors(node: int) -> None:
    catalogue = Catalogue(padded([(1, 2, 3)]), V)
    for operation in (catalogue.children, catalogue.is_terminal, lambda n: catalogue.child(n, 1)):
        with pytest.raises(cpu.Error, match="no node"):
            operation(node)


def test_views_outlive_the_catalogue() -> None:
    catalogue = Catalogue(padded([(1, 2), (1, 3)]), V)
    children = catalogue.children(1)
    del catalogue
    assert children.tolist() == [2, 3]


# --- sampling

EOS = 49
ITEMS = [(1, 2, 3), (1, 2), (1, 4, 5), (7,), (8, 8, 8), (30, EOS)]


def rule_of(items: Sequence[Item], ends: Sequence[int] = (EOS,)) -> CatalogueRule:
    return CatalogueRule(PlacedCatalogue(Catalogue(padded(items), V), torch.device("cpu")), ends)


def sample_item(params: SamplingParams, seed: int, outputs: Item = (), items: Sequence[Item] = ITEMS) -> Item:
    """Samples until the row has nothing left; the tokens."""
    sampler = cpu.Sampler(1, V)
    sampler.open_row(row_spec(0, params, seed=seed, prompt=(1, 2, 3), outputs=outputs))
    constrain_row(sampler, 0, rule_of(items), outputs)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(outputs)
    for position in range(10):
        logits = torch.randn(1, V, generator=generator) * 3
        token, bad = sampler.sample(logits, np.zeros(1, np.int32), np.array([position], np.int32))
        if bad[0]:
            return tuple(tokens)
        tokens.append(int(token[0]))
    raise AssertionError("no end")


@pytest.mark.parametrize("params", [SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=0.0)])
def test_sampled_items_are_members(params: SamplingParams) -> None:
    found = {sample_item(params, seed) for seed in range(80)}
    assert found <= {(*item, EOS) for item in ITEMS}
    assert len(found) > 3


def test_a_row_that_comes_back_goes_on_where_it_was() -> None:
    params = SamplingParams(max_tokens=9)
    found = {sample_item(params, seed, outputs=(1, 4)) for seed in range(10)}
    assert found == {(1, 4, 5, EOS)}


def test_other_masks_still_hold() -> None:
    params = SamplingParams(max_tokens=9, allowed_token_ids=(1, 2, 4, 5, EOS))
    found = {sample_item(params, seed) for seed in range(40)}
    assert found == {(1, 2, EOS), (1, 4, 5, EOS)}


def test_what_was_retired_leaves_the_device() -> None:
    handles, placed = CatalogueHandles(), PlacedCatalogues(torch.device("cpu"))
    first, second, third = (ragged([(1, number)], 10, 1) for number in (2, 3, 4))

    def rule_of_next_plan(catalogue: Catalogue) -> CatalogueRule:
        spec = CatalogueSpec(handle=handles.handle_of(catalogue), end_token_ids=(0,))
        for change in handles.take_changes():
            if isinstance(change, Registration):
                placed.register(change.handle, change.catalogue)
            else:
                placed.release(change.handle)
        return placed.rule(spec)

    rule = rule_of_next_plan(first)
    rule_of_next_plan(second)
    assert rule_of_next_plan(first) is rule and len(placed) == 2
    first.retired = True
    rule_of_next_plan(third)
    assert len(placed) == 3, "the plan that let it go may name it"
    assert rule_of_next_plan(second).catalogue is second and len(placed) == 2
    assert rule_of_next_plan(first) is not rule, "who was let in before may still come"


def test_the_least_recently_used_catalogue_leaves() -> None:
    first, second, third = (ragged([(1, number)], 10, 1) for number in (2, 3, 4))
    handles = CatalogueHandles(most_bytes=2 * first.num_bytes)
    one, two = handles.handle_of(first), handles.handle_of(second)
    assert handles.handle_of(first) == one and len(handles.take_changes()) == 2
    assert handles.take_changes() == ()
    three = handles.handle_of(third)
    assert len(handles) == 2 and handles.take_changes() == (Registration(three, third),)
    assert handles.take_changes() == (Release(two),)
    assert handles.handle_of(first) == one


def test_items_of_a_catalogue_make_it_again() -> None:
    draw = np.random.default_rng(0)
    for num in (1, 2, 30, 400):
        items = [tuple(draw.integers(0, 6, draw.integers(1, 7)).tolist()) for _ in range(num)]
        catalogue = ragged(items, 10, 1)
        tokens, offsets = catalogue.items()
        found = [tuple(tokens[begin:end].tolist()) for begin, end in itertools.pairwise(offsets.tolist())]
        assert sorted(found) == sorted(set(items)) and catalogue.num_items == len(found)
        again = Catalogue.from_ragged(tokens, offsets, 10)
        for name in ("tokens", "first_child", "terminal"):
            assert np.array_equal(getattr(again.tree, name), getattr(catalogue.tree, name))
