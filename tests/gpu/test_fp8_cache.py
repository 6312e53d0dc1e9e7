"""The fp8 cache on a GPU: attention over it against a float32 reference over what it holds, its roundings against
torch's, and the whole engine against transformers with a cache rounded alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bequest.engine.config import EngineConfig
from bequest.engine.kernels import cuda as ops
from bequest.engine.kernels import cuda_attention as cuda
from bequest.engine.kernels.kv_format import FP8, UNSCALED, KvScales
from tests.engine.direct import LLM
from tests.engine.model_leases import check_leases_survive
from tests.engine.rounded_reference import round_caches, rounded
from tests.engine.test_against_transformers import PARAMS, Judge, prompts
from tests.engine.test_beams_against_transformers import check_searches
from tests.engine.test_encoder_decoder_models import save_model
from tests.engine.test_fp8_cache import check_rounded
from tests.gpu.test_attention import (
    DECODE,
    DEVICE,
    DTYPES,
    LAYER,
    MIXED,
    NUM_LAYERS,
    PREFILL,
    PREFIXES,
    SMALL,
    Case,
    Step,
    check_rows,
    make_step,
    run,
    workspace_of,
)
from tests.gpu.test_shared_prefix import sharers
from tests.tiny_models import make_reference

pytestmark = pytest.mark.gpu

LENS = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED}


def fp8_step(case: Case, scales: KvScales = UNSCALED, common: tuple[int, ...] = ()) -> Step:
    """A step whose cache is fp8; slots that nobody sees hold its NaN."""
    step = make_step(case, common=common)
    cache = step.kv_cache.float()
    cache[:, :, 0] /= scales.key
    cache[:, :, 1] /= scales.value
    keys = tuple(rounded(k.float(), scales.key) for k in step.keys)
    values = tuple(rounded(v.float(), scales.value) for v in step.values)
    stored = cache.clamp(-448, 448).to(FP8)
    assert (stored.view(torch.uint8) & 0x7F == 0x7F).any(), "NaN must be among what nobody sees"
    return replace(step, kv_cache=stored, keys=keys, values=values)


def attend(case: Case, step: Step, scales: KvScales = UNSCALED) -> Tensor:
    """The rows over a cache with `scales`."""
    out = torch.full((case.num_tokens, case.num_q_heads, case.head_dim), 7.0, dtype=case.dtype, device=DEVICE)
    plan = workspace_of(case).plan(step.query_start, step.seq_lens, step.block_tables)
    return cuda.paged_attention(
        step.q, step.kv_cache, LAYER, plan, case.scale, case.soft_cap, out, scales=scales, sinks=case.sinks
    )


def check(case: Case, common: tuple[int, ...] = ()) -> None:
    step = fp8_step(case, common=common)
    check_rows(case, step, run(case, step))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("lens", LENS)
def test_block_sizes(lens: str, block_size: int, dtype: torch.dtype) -> None:
    check(Case(LENS[lens], block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1), (14, 2), (16, 1), (64, 2)], ids=str)
def test_heads(lens: str, head_dim: int, heads: tuple[int, int]) -> None:
    check(Case(LENS[lens], num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [{"window": 1}, {"window": 16}, {"window": 100}, {"soft_cap": 3.0}, {"causal": False}, {"has_sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_masks_and_caps(change: dict[str, float], head_dim: int, dtype: torch.dtype) -> None:
    check(replace(Case(MIXED, head_dim=head_dim, dtype=dtype), **change))


@pytest.mark.parametrize("reach", [0, 17, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bias_by_distance(reach: int, head_dim: int) -> None:
    check(Case(MIXED, causal=False, bias_reach=reach, head_dim=head_dim))


@pytest.mark.parametrize(
    "lens",
    [
        ((1, 65536), (1, 1), (1, 300), (1, 9000)),
        ((40, 30000), (1, 20000), (3, 3)),
        tuple((1, 10 + 37 * i) for i in range(300)),
        ((1500, 1500), (700, 2900)),
    ],
    ids=lambda lens: f"{len(lens)}-{lens[0]}",
)
def test_long_and_many(lens: tuple[tuple[int, int], ...]) -> None:
    check(Case(lens, num_q_heads=32, num_kv_heads=8))


@pytest.mark.parametrize(("count", "keys"), [(5, 129), (33, 704), (40, 4096), (40, 9000)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_shared_prefixes(count: int, keys: int, head_dim: int) -> None:
    case = Case(sharers(count, keys), num_q_heads=32, num_kv_heads=8, head_dim=head_dim)
    check(case, common=(keys,) * count)


@pytest.mark.parametrize("block_size", [8, 16, 64, 128])
@pytest.mark.parametrize(
    "change",
    [{}, {"window": 70}, {"window": 129}, {"causal": False}, {"soft_cap": 3.0}, {"has_sinks": True}],
    ids=str,
)
@pytest.mark.parametrize("query_len", [17, 64, 65, 129])
@pytest.mark.parametrize("heads", [(4, 1, 128), (2, 2, 64), (96, 1, 128), (7, 1, 64)], ids=str)
def test_prefixes_around_tile_ends(
    heads: tuple[int, int, int], query_len: int, change: dict[str, float], block_size: int
) -> None:
    """Chunks behind a cached prefix, with scales: the diagonal and the end of the keys at every place of a tile."""
    shape = Case(
        tuple((query_len, prefix + query_len) for prefix in PREFIXES),
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        block_size=block_size,
    )
    case, scales = replace(shape, **change), KvScales(key=0.5, value=3.0)
    step = fp8_step(case, scales)
    check_rows(case, step, attend(case, step, scales))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "lens", [((2000, 2000), (700, 2900), (17, 40), (64, 6000)), ((130, 130),) * 150], ids=["long", "many"]
)
def test_the_same_bits_each_time(lens: tuple[tuple[int, int], ...], head_dim: int) -> None:
    case = Case(lens, num_q_heads=32, num_kv_heads=8, head_dim=head_dim)
    step = fp8_step(case)
    first = attend(case, step)
    check_rows(case, step, first)
    for _ in range(20):
        assert torch.equal(attend(case, step), first)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_code(head_dim: int) -> None:
    """Of keys and of values, from the smallest on: each of the 254 numbers times a scale, and nothing else."""
    case = Case(((40, 300), (90, 90)), head_dim=head_dim)
    step = fp8_step(case)
    generator = torch.Generator(DEVICE).manual_seed(1)
    codes = torch.randint(0, 254, step.kv_cache.shape, dtype=torch.uint8, generator=generator, device=DEVICE)
    codes += codes >= 127  # 127 and 255 are NaN
    seen = step.kv_cache.view(torch.uint8) & 0x7F != 0x7F
    cache = torch.where(seen, codes, step.kv_cache.view(torch.uint8)).view(FP8)
    scales = KvScales(key=2.0**-7, value=2.0**-6)
    keys, values = [], []
    for s, (_, seq_len) in enumerate(case.lens):
        table = torch.from_numpy(step.block_tables[s]).to(DEVICE).long()
        rows = cache[table, LAYER].float().permute(1, 0, 3, 2, 4).reshape(2, -1, case.num_kv_heads, head_dim)
        keys.append(rows[0, :seq_len] * scales.key)
        values.append(rows[1, :seq_len] * scales.value)
    step = replace(step, kv_cache=cache, keys=tuple(keys), values=tuple(values))
    check_rows(case, step, attend(case, step, scales))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("kind", [0, 1], ids=["key", "value"])
def test_nan_stays_nan(kind: int, code: int, head_dim: int) -> None:
    """Whoever sees it: a number in its place would hide that something failed."""
    position, dim = 150, 21
    case = Case(((300, 300),), head_dim=head_dim)
    step = fp8_step(case)
    blocks = torch.from_numpy(step.block_tables[0]).to(DEVICE).long()
    block_size = step.kv_cache.shape[-2]
    stored = step.kv_cache.view(torch.uint8)
    stored[blocks[position // block_size], LAYER, kind, :, position % block_size, dim] = code
    out = attend(case, step)
    assert out[position:, :, dim].isnan().all()
    if kind == 0:
        assert out[position:].isnan().all()
        assert out[:position].isfinite().all()


@pytest.mark.parametrize(
    ("lens", "dtype"), [*((lens, dtype) for lens in LENS for dtype in DTYPES), ("long", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_scales(lens: str, head_dim: int, soft_cap: float, dtype: torch.dtype) -> None:
    """Of decode and prefill, of whole tiles and of those that are merged."""
    scales = KvScales(key=0.037, value=7.3)
    lens_of = LENS.get(lens, ((1, 20000), (100, 8000)))
    case = Case(lens_of, head_dim=head_dim, dtype=dtype, soft_cap=soft_cap)
    step = fp8_step(case, scales)
    check_rows(case, step, attend(case, step, scales))


def test_large_queries_stay_finite() -> None:
    """Beyond what float16 holds: the largest of it is as decisive."""
    case = Case(((1, 40), (70, 70)))
    step = fp8_step(case)
    step.q[:, :, 0] = 1e6
    assert run(case, step).isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small(head_dim: int, dtype: torch.dtype) -> None:
    """Small enough for compute-sanitizer."""
    check(Case(SMALL, head_dim=head_dim, dtype=dtype))


# --- writing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [20, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("tokens", [3, 200])
def test_writes_are_rounded_as_torch_does(tokens: int, head_dim: int, dtype: torch.dtype) -> None:
    """Values from the smallest codes to beyond the largest, for few tokens and for many."""
    scales = KvScales(key=0.25, value=8.0)
    heads = 3
    wide = torch.randn(tokens, 2 * heads, head_dim, device=DEVICE) * torch.logspace(-4, 4, head_dim, device=DEVICE)
    wide = wide.to(dtype)
    k, v = wide[:, :heads], wide[:, heads:]
    slots = torch.randperm(300, device=DEVICE)[:tokens]
    slots[1] = -1
    cache = torch.full((20, NUM_LAYERS, 2, heads, 16, head_dim), 7.0, device=DEVICE).to(FP8)
    expected = cache.float()
    stored = slots >= 0
    at = slots[stored] // 16, LAYER
    expected[at[0], LAYER, 0, :, slots[stored] % 16] = saturated(k[stored].float() * 4.0)
    expected[at[0], LAYER, 1, :, slots[stored] % 16] = saturated(v[stored].float() / 8.0)
    ops.write_kv(k, v, cache, LAYER, slots, scales)
    assert torch.equal(cache.float(), expected)


def saturated(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(FP8).float()


def test_nan_and_infinity_are_stored() -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 448.0, 465.0, -0.0] + [1.0] * 58, device=DEVICE)
    cache = torch.zeros(1, 1, 2, 1, 16, 64, device=DEVICE).to(FP8)
    heads = values.view(1, 1, 64)
    ops.write_kv(heads, heads, cache, 0, torch.tensor([5], device=DEVICE))
    stored = cache[0, 0, :, 0, 5, :6].float()
    assert (
        stored[:, 0].isnan().all() and (stored[:, 1:] == torch.tensor([448.0, -448, 448, 448, 0], device=DEVICE)).all()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prepared_keys_are_the_rounded_ones(dtype: torch.dtype) -> None:
    """Rotated and normed keys of an fp8 cache are those of a cache in `dtype`, rounded once more or at once."""
    tokens, q_heads, kv_heads, head_dim = 150, 4, 2, 128
    qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * head_dim, device=DEVICE).to(dtype)
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE)
    angles = torch.randn(tokens, head_dim // 2, device=DEVICE)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
    norm = ops.QkNorm(*torch.rand(2, head_dim, device=DEVICE).to(dtype), 1e-6)
    slots = torch.arange(tokens, device=DEVICE)
    caches = [torch.zeros(10, 1, 2, kv_heads, 16, head_dim, device=DEVICE).to(kind) for kind in (dtype, FP8)]
    queries = [
        ops.prepare_qkv(qkv.clone(), q_heads, cache, 0, slots, positions, cos_sin, norm).clone() for cache in caches
    ]
    assert torch.equal(*queries)
    plain, stored = caches[0].float(), caches[1].float()
    assert torch.equal(stored[:, :, 1], saturated(plain[:, :, 1]))
    error = (stored[:, :, 0] - plain[:, :, 0]).abs()
    assert (error <= plain[:, :, 0].abs() / 15 + 2**-10).all() and error.mean() > 0


# --- engines


def config(directory: Path, **fields: object) -> EngineConfig:
    shape = {"kv_cache_dtype": "fp8", "block_size": 16, "max_num_batched_tokens": 256, "max_model_len": 96}
    return EngineConfig(model=str(directory), device="cuda", **(shape | {"num_blocks": 400} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_float32_equals_transformers_with_a_rounded_cache(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    round_caches(monkeypatch)
    asked = prompts()
    judge = Judge(make_reference(name), asked)
    with LLM(config(tiny_model(name), dtype="float32", max_num_seqs=32)) as llm:
        for _ in range(2):  # the second round finds its prompts in the prefix cache
            answers = llm.generate(asked, PARAMS, progress=False)
            # Sums in other orders than transformers': more keys are rounded the other way than on a CPU.
            check_rounded(answers, judge(answers), tolerance=0.1, equal=12)


@pytest.mark.parametrize("name", ["llama-head-64", "qwen3-head-128", "llama-odd-head"])  # the last one padded
def test_bfloat16_is_near_it(name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    round_caches(monkeypatch)
    asked = prompts()
    judge = Judge(make_reference(name), asked)
    with LLM(config(tiny_model(name), dtype="bfloat16", max_num_seqs=32)) as llm:
        answers = llm.generate(asked, PARAMS, progress=False)
    equal = 0
    for answer, one in zip(answers, judge(answers), strict=True):
        tokens = list(answer.choices[0].token_ids)
        first = next((i for i, (a, b) in enumerate(zip(tokens, one.tokens, strict=True)) if a != b), None)
        equal += first is None
        if first is not None:
            gap = one.logprobs[first].max() - one.logprobs[first][tokens[first]]
            assert gap < 0.35, f"token {first}: {tokens[first]} lies {gap:.3f} under the best"
    # Every difference lies between two near logits, as above; a padded head brings more of them.
    assert equal >= len(asked) // 5


async def test_leases_go_to_the_host_and_come_back(tiny_model: Callable[[str], Path]) -> None:
    fields = {"dtype": "float32", "num_blocks": 40, "host_cache_gb": 0.1, "max_num_seqs": 32}
    await check_leases_survive(config(tiny_model("llama-head-64"), **fields))


def test_beams(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    round_caches(monkeypatch)
    check_searches(
        make_reference("llama"), config(tiny_model("llama"), dtype="float32", num_blocks=900, max_num_seqs=64)
    )


def test_an_encoder_decoder(tmp_path: Path) -> None:
    """Cross keys and values are of the cache too; the encoder's own scratch is not."""
    directory = save_model("bart", tmp_path)
    answers = []
    for dtype in ("auto", "fp8"):
        fields = {"kv_cache_dtype": dtype, "dtype": "bfloat16", "max_num_seqs": 8, "max_model_len": 32}
        with LLM(config(directory, **fields)) as llm:
            answers.append(llm.generate([[5, 6, 7, 8, 9]] * 3, replace(PARAMS, max_tokens=6), progress=False))
    for plain, stored in zip(*answers, strict=True):
        a, b = plain.choices[0], stored.choices[0]
        assert a.logprobs is not None and b.logprobs is not None
        assert abs(a.logprobs[0].logprob - b.logprobs[0].logprob) < 0.3
