"""What else a model may be made of, cut into parts: encoders, codes, adapters, images of memory that ranks have."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from gguf import GGMLQuantizationType
from torch import Tensor

from bequest.engine.adapters.load import loader_of
from bequest.engine.kernels.cpu_lora import LoraMatrices
from bequest.engine.layers.codes import Float8Rows, IntegerRows
from bequest.engine.models.cutting import Cutting
from bequest.engine.models.load import LoadedModel, load_model
from bequest.engine.models.quantised.made import float8_rows
from bequest.engine.runner.block_bytes import bytes_of, layout_of
from bequest.engine.runner.block_parts import BlockParts
from tests.adapters.tiny_adapters import make_adapter, save_adapter
from tests.models import tiny_quantised as tiny
from tests.models.paged import PagedSequences
from tests.models.paged_cross import CrossSequences
from tests.models.test_encoder_decoder import DECODER_LENS, make_inputs, make_tokens
from tests.models.test_quantised import TOOLS
from tests.models.tiny_gguf import write_tiny_gguf
from tests.ranks.test_cut_models import assert_near
from tests.ranks.threads import on_ranks
from tests.tiny_encoder_decoders import TINY_ENCODER_DECODERS, save_encoder_decoder
from tests.tiny_models import VOCAB_SIZE, make_reference

TOKENS = [(7 * i + 3) % VOCAB_SIZE for i in range(23)]


def logits_of(loaded: LoadedModel, adapter: Path | None = None) -> Tensor:
    sequences = PagedSequences(loaded.model, 1, len(TOKENS))  # type: ignore[arg-type]
    if adapter is not None:
        matrices = loader_of(loaded, max_rank=64)(adapter).matrices
        assert isinstance(matrices, LoraMatrices)
        sequences.adapters = {0: matrices}
    return sequences.run(0, TOKENS, chunk=9)


def encoder_decoder_logits(loaded: LoadedModel) -> Tensor:
    sequences = CrossSequences(loaded, make_inputs(loaded.model), max(DECODER_LENS))  # type: ignore[arg-type]
    return torch.cat(list(sequences.step(dict(enumerate(make_tokens()))).values()))


def some(names: Iterable[str], every_run: set[str]) -> list[ParameterSet]:
    return [pytest.param(name, marks=[] if name in every_run else pytest.mark.cluster) for name in names]


@pytest.mark.parametrize("name", some(TINY_ENCODER_DECODERS, {"bart-scaled-relu-untied", "t5", "whisper"}))
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.cluster), 4])
def test_the_parts_of_an_encoder_decoder(name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, config = TINY_ENCODER_DECODERS[name]
    even = type(config)(**config.to_dict() | {"encoder_attention_heads": 4, "decoder_attention_heads": 4})
    monkeypatch.setitem(TINY_ENCODER_DECODERS, name, (kind, even))  # theirs are odd where they can be
    path = save_encoder_decoder(name, tmp_path)
    expected = encoder_decoder_logits(load_model(path))
    for part in on_ranks(size, lambda ranks: encoder_decoder_logits(load_model(path, ranks=ranks))):
        assert_near(part, expected)


@pytest.mark.parametrize("tool", some(TOOLS, {"fp8-blocks", "gptq-act-order", "int8"}))
@pytest.mark.parametrize("name", ["llama", pytest.param("mixtral", marks=pytest.mark.cluster)])
def test_the_parts_of_a_model_in_codes(name: str, tool: str, tmp_path: Path) -> None:
    """Groups of columns that a cut would part are loaded as numbers, which may round otherwise."""
    tiny.write(name, tmp_path, TOOLS[tool])
    expected = logits_of(load_model(tmp_path))
    for part in on_ranks(2, lambda ranks: logits_of(load_model(tmp_path, ranks=ranks))):
        assert_near(part, expected, 4e-3)


def test_codes_stay_codes_where_groups_are_whole(tmp_path: Path) -> None:
    tiny.write("llama", tmp_path, TOOLS["int8"])
    for loaded in on_ranks(2, lambda ranks: load_model(tmp_path, ranks=ranks)):
        assert loaded.formats == ("codes of 8 bits", "float32")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_the_parts_of_a_gguf(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf("llama", path, kind)
    expected = logits_of(load_model(path))
    for part in on_ranks(2, lambda ranks: logits_of(load_model(path, ranks=ranks))):
        assert_near(part, expected)


# Joined matrices, turned rows, norms over all heads, shared experts, recurrent layers.
@pytest.mark.parametrize(
    "name", some(["llama", "phi3", "cohere", "olmo2", "qwen2-moe", "qwen3.5"], {"phi3", "qwen2-moe"})
)
def test_each_rank_takes_its_part_of_an_adapter(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = save_adapter(make_adapter(make_reference(name), "one"), tmp_path / "one")
    path = tiny_model(name)
    expected = logits_of(load_model(path), adapter)
    assert (expected - logits_of(load_model(path))).abs().max() > 0.01 * expected.abs().max()
    for part in on_ranks(2, lambda ranks: logits_of(load_model(path, ranks=ranks), adapter)):
        assert_near(part, expected, 4e-5)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding")
@pytest.mark.parametrize("name", some(["qwen2-moe", "gpt-oss"], {"gpt-oss"}))
def test_each_rank_takes_its_part_of_experts_and_all_of_the_vocabulary(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    options = {
        "target_modules": ["embed_tokens", "lm_head"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    adapter = save_adapter(make_adapter(make_reference(name), "one", **options), tmp_path / "one")
    path = tiny_model(name)
    expected = logits_of(load_model(path), adapter)
    for part in on_ranks(2, lambda ranks: logits_of(load_model(path, ranks=ranks), adapter)):
        assert_near(part, expected, 4e-5)


def random_codes(group: int) -> list[Float8Rows | IntegerRows]:
    random = torch.Generator().manual_seed(5)
    codes = torch.randint(256, (6, 96), generator=random, dtype=torch.uint8)
    scales = torch.rand(6, -(-96 // group), generator=random)
    zeros = torch.full_like(scales, 128, dtype=torch.int16)
    floats = float8_rows(torch.randn(6, 96, generator=random))
    return [IntegerRows(8, codes, scales, zeros, group), replace(floats, scales=scales, group=group)]


@pytest.mark.parametrize("group", [16, 32, 96, 128])
@pytest.mark.parametrize("columns", [slice(0, 96), slice(0, 32), slice(32, 96), slice(64, 96)])
def test_columns_of_codes_are_columns_of_their_values(group: int, columns: slice) -> None:
    for codes in random_codes(group):
        part = codes.take_columns(columns)
        assert part is not None
        assert torch.equal(part.values(), codes.values()[:, columns])


def test_columns_that_part_a_group_are_refused() -> None:
    for codes in random_codes(64):
        assert codes.take_columns(slice(32, 96)) is None


@pytest.mark.parametrize("name", ["llama", "olmo2", "qwen3.5"])
@pytest.mark.parametrize("size", [2, 4])
def test_blocks_and_states_leave_whole_and_come_back_in_parts(
    name: str, size: int, tiny_model: Callable[[str], Path]
) -> None:
    """What ranks have in their caches is, side by side, what one rank has in its."""
    path = tiny_model(name)

    def caches(loaded: LoadedModel) -> tuple[Cutting | None, PagedSequences]:
        sequences = PagedSequences(loaded.model, 1, len(TOKENS))  # type: ignore[arg-type]
        sequences.run(0, TOKENS, chunk=9)
        return loaded.cutting, sequences

    _, whole = caches(load_model(path))
    found = on_ranks(size, lambda ranks: caches(load_model(path, ranks=ranks)))
    parts = []
    for cutting, sequences in found:
        assert cutting is not None
        states = sequences.states if sequences.states[0].numel() else None
        parts.append(BlockParts(cutting, layout_of(sequences.kv_cache, sequences.windows, states)))
    layout = layout_of(whole.kv_cache, whole.windows, whole.states if whole.states[0].numel() else None)
    assert all(part.whole == layout for part in parts)

    own = [bytes_of(sequences.kv_cache) for _, sequences in found]
    joined = parts[0].join(own)
    assert near(joined, bytes_of(whole.kv_cache))
    for part, content in zip(parts, own, strict=True):
        assert np.array_equal(part.cut(joined), content)
    if layout.state_bytes:
        own = [bytes_of(sequences.states) for _, sequences in found]
        joined = parts[0].join_states(own)
        assert near(joined, bytes_of(whole.states))
        for part, content in zip(parts, own, strict=True):
            assert np.array_equal(part.cut_states(joined), content)


def near(actual: np.ndarray, expected: np.ndarray) -> bool:
    return np.allclose(actual.view(np.float32), expected.view(np.float32), rtol=1e-4, atol=1e-5, equal_nan=True)
