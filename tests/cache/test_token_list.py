from __future__ import annotations

import numpy as np
import pytest

from bequest.engine._C import Error, TokenList


def test_grows_and_is_cut_at_the_end() -> None:
    tokens = TokenList([5, 6])
    tokens.append(7)
    tokens.extend(i for i in (8, 9))
    tokens.extend(np.array([10, 11], dtype=np.int32))
    assert tokens.to_list() == [5, 6, 7, 8, 9, 10, 11]
    tokens.truncate(3)
    assert tokens.to_list() == [5, 6, 7] and len(tokens) == 3
    tokens.truncate(0)
    assert tokens == TokenList()
    with pytest.raises(Error, match="truncated"):
        tokens.truncate(1)


def test_indexing_is_that_of_a_list() -> None:
    plain = [3, 1, 4, 1, 5]
    tokens = TokenList(plain)
    for i in range(-5, 5):
        assert tokens[i] == plain[i]
    for i in (-6, 5):
        with pytest.raises(IndexError):
            tokens[i]
    for cut in (slice(None), slice(1, 3), slice(-2, None), slice(4, 0, -2), slice(9, 12), slice(3, 1)):
        assert tokens[cut] == plain[cut]


def test_array_is_a_copy() -> None:
    tokens = TokenList([1, 2])
    array = tokens.array()
    assert array.dtype == np.int32 and array.tolist() == [1, 2]
    array[0] = 9
    assert tokens[0] == 1


def test_equality() -> None:
    assert TokenList([1, 2]) == TokenList((1, 2))
    assert TokenList([1, 2]) != TokenList([1])
    with pytest.raises(TypeError):
        hash(TokenList())


@pytest.mark.parametrize("bad", [-1, 2**31, 2**70, "7", 1.5])
def test_a_bad_token_changes_nothing(bad: object) -> None:
    tokens = TokenList([1])
    with pytest.raises((Error, OverflowError, TypeError)):
        tokens.extend([2, bad])  # type: ignore[list-item]
    with pytest.raises((Error, OverflowError, TypeError)):
        tokens.append(bad)  # type: ignore[arg-type]
    assert tokens.to_list() == [1]


def test_common_prefix() -> None:
    tokens = TokenList([1, 2, 3, 4])
    for other, common in (([], 0), ([1, 2], 2), ([1, 2, 3, 4], 4), ([1, 2, 3, 4, 5], 4), ([1, 9, 3], 1), ([9, 2], 0)):
        assert tokens.common_prefix(TokenList(other)) == TokenList(other).common_prefix(tokens) == common
