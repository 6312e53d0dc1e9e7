"""The C++ core. Addresses are data pointers as integers, 0 for null; dtypes are the codes of csrc/core/dtype.h."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, overload

import numpy as np
import numpy.typing as npt

Ids = Sequence[int]
Ints = npt.NDArray[np.int32]
Pairs = list[tuple[int, int]]  # (source, destination)
Strips = tuple[Sequence[int], int, int]  # windows, interval, most_chunk: as in csrc/cache/strips.h

with_cuda: bool
beam_group_bytes: int
max_beam_candidates: int
cuda_max_beam_rows: int
cuda_sampler_row_bytes: int
cuda_row_update_bytes: int
cuda_chain_scratch_bytes: int

class Error(RuntimeError): ...

def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def isa() -> str: ...
def keep_freed_memory() -> None: ...
def advise_large_pages(address: int, num_bytes: int) -> None: ...
def populate_pages(address: int, num_bytes: int) -> bool: ...

# --- Structs that are passed as tuples, csrc/bindings/tensors.h

Rows = tuple[int, int, int]  # address, rows, elements between rows; those of a dense [rows, columns] are its columns
Heads = tuple[int, int, int, int, int]  # address, T, heads, D, elements between tokens
Norm = tuple[int, int, float]  # weight and bias [H], 0 without a bias; eps
HiddenTap = tuple[int, int, int, int, int, bool]  # ring rows, layers, ring, rows of the ring; layer, of the output
Biased = tuple[PackedMatrix, int]  # matrix [N, K], bias [N] (0: none)
Blocks = tuple[int, int]  # address, blocks
KvSizes = tuple[int, int, int, int, int]  # NB, L, NKV, BS, D
LayerCache = tuple[KvCacheView, int, float, float]  # cache, layer, what its keys and values are to be multiplied by
# scale, soft cap (0: none), bias [NQ, 2 R + 1] (0: none), R, sinks [NQ] (0: none)
ScoreRule = tuple[float, float, int, int, int]
HeadCounts = tuple[int, int, int]  # NQ, NKV, D
Mask = tuple[bool, int]  # causal, window (0: none)
DeviceFacts = tuple[int, int, bool]  # multiprocessors, cuda_prefill_blocks_per_sm, cuda_has_wide_tiles
DeltaSizes = tuple[int, int, int, int, int]  # HK, HV, DK, DV, CW
DeltaWeights = tuple[int, int, int, int, float]  # taps [CW, C], decay [HV], step bias [HV], norm [DV], eps
DeltaStates = tuple[int, int, int, int, int]  # of a layer, floats between slots, slots; starts [S], slots [T]
SequenceRows = tuple[int, int, int, int]  # rows, T, query_start [S + 1], S
AttentionBatch = tuple[int, int, int, int, int]  # query_start [S + 1], seq_lens [S], block_tables [S, MB], S, MB

# --- csrc/ops

class PackedMatrix:  # a weight [N, K] in a format of csrc/ops/cpu/linear.h
    def __init__(self, data: int, format: int, out_features: int, in_features: int) -> None: ...
    def pack(self, rows: int, dtype: int, first_row: int, num_rows: int) -> None: ...
    def pack_quantised(self, rows: int, bits: int, first_row: int, num_rows: int) -> None: ...

def linear(x: Rows, weight: PackedMatrix, bias: int, out: int) -> None: ...
def finished_linear(x: Rows, weight: PackedMatrix, bias: int, out: int, activation: int, gated: bool) -> None: ...
def feed_forward(x: Rows, up: Biased, down: Biased, out: int, activation: int, gated: bool) -> None: ...
def gather_rows(ids: int, num_tokens: int, weight: PackedMatrix, out: int) -> None: ...
def rms_norm(x: Rows, norm: Norm, residual: int, out: int, tap: HiddenTap | None) -> None: ...
def layer_norm(x: Rows, norm: Norm, residual: int, out: int, tap: HiddenTap | None) -> None: ...
def delta_net(sizes: DeltaSizes, of: SequenceRows, weights: DeltaWeights, states: DeltaStates, out: int) -> None: ...
def sigmoid_gate(x: int, gate: int, count: int) -> None: ...
def cuda_delta_net(
    sizes: DeltaSizes,
    of: SequenceRows,
    weights: DeltaWeights,
    states: DeltaStates,
    out: tuple[int, int],  # address, dtype
    stream: int,
) -> None: ...
def cuda_sigmoid_gate(x: int, gate: int, dtype: int, count: int, stream: int) -> None: ...
def tap_rows(x: Rows, tap: HiddenTap) -> None: ...
def head_rms_norm(x: Heads, weight: int, eps: float) -> None: ...
def rotary(q: Heads, k: Heads, positions: int, cos_sin: Rows) -> None: ...
def gated_activation(gate_up: int, out: int, num_tokens: int, intermediate: int, activation: int) -> None: ...
def activate(x: int, count: int, activation: int) -> None: ...

# --- csrc/ops: experts

# top_k, scoring (0 softmax, 1 sigmoid), bias [E] or 0, num_groups, top_groups, group_best, renormalises, factor
RoutingRule = tuple[int, int, int, int, int, int, bool, float]
ChosenExperts = tuple[int, int, int, int]  # ids, weights [T, top_k], T, top_k

class PackedExperts:  # one of each expert, `stride` bytes apart; the address of their biases [E, N], or 0
    def __init__(self, first: PackedMatrix, stride: int, num_experts: int, bias: int) -> None: ...

def route_experts(logits: Rows, rule: RoutingRule, ids: int, weights: int) -> None: ...
def expert_gated(gate_up: PackedExperts, chosen: ChosenExperts, x: int, activation: int, out: int) -> None: ...
def expert_summed(down: PackedExperts, chosen: ChosenExperts, x: int, out: int) -> None: ...
def add_gated_rows(rows: Rows, gates: int, weights: int, out: int) -> None: ...

# --- csrc/attention, KV tensors

class KvCacheView:  # a cache tensor [NB, L, 2, NKV, BS, D]
    def __init__(self, data: int, dtype: int, sizes: KvSizes) -> None: ...

def write_kv(k: Rows, v: Rows, slots: int, to: LayerCache) -> None: ...
def copy_blocks(source: Blocks, destination: Blocks, block_bytes: int, pairs: int, num_pairs: int) -> None: ...

class AttentionPlan:
    def __init__(
        self, batch: AttentionBatch, heads: HeadCounts, mask: Mask, block_size: int, num_blocks: int, bfloat16: bool
    ) -> None: ...
    num_tokens: Final[int]
    num_items: Final[int]

def paged_attention(q: Rows, out: int, of: LayerCache, plan: AttentionPlan, scores: ScoreRule) -> None: ...

# --- csrc/model, layers on the CPU in one call; what these hold is in layer_stack.h

class StackNorm:  # of all three, or of nothing
    def __init__(self, weight: int = ..., bias: int = ..., eps: float = ...) -> None: ...

class StackProduct:
    def __init__(self, weight: int, format: int, bias: int, out_features: int, in_features: int, site: int) -> None: ...

class StackHeads:
    num_heads: int
    scale: float
    cache_layer: int
    strip: int
    q_norm: int
    k_norm: int
    norms_rows: bool
    norm_eps: float
    cos_sin: int
    num_positions: int
    rotary_dim: int
    bias: int
    bias_reach: int
    soft_cap: float
    sinks: int
    value_scale: float
    key_factor: float
    value_factor: float

class StackAttention:
    def __init__(self, qkv: StackProduct, heads: StackHeads, output: StackProduct) -> None: ...

class StackCross:
    def __init__(self, q: StackProduct, heads: StackHeads, output: StackProduct) -> None: ...

class StackFeedForward:
    def __init__(self, up: StackProduct, activation: int, down: StackProduct, gated: bool) -> None: ...

class StackExperts:
    def __init__(
        self,
        router: StackProduct,
        routing: RoutingRule,
        up: PackedExperts,
        activation: int,
        down: PackedExperts,
        shared: tuple[StackFeedForward, StackProduct | None] | None,
    ) -> None: ...

StackMixer = StackAttention | StackCross | StackFeedForward | StackExperts

class StackSublayer:
    def __init__(
        self, mixer: StackMixer, norms: tuple[StackNorm, StackNorm, StackNorm], factor: float, beside: bool
    ) -> None: ...

class Adapter:  # parts are a, b, rank, first column, columns, scale
    def __init__(self, sites: Mapping[int, Sequence[tuple[int, int, int, int, int, float]]]) -> None: ...

class StepAdapters:
    def __init__(self, groups: Sequence[tuple[Adapter, Sequence[int]]]) -> None: ...
    def rows_at(self, site: int) -> list[int]: ...
    def add(self, site: int, x: int, in_features: int, y: int, out_features: int) -> None: ...

class StackStep:
    num_tokens: int
    positions: int
    def set_slots(self, slots: Sequence[int]) -> None: ...  # the address of each strip's
    def set_cache(self, kv_cache: int, kv_dtype: int, kv_sizes: KvSizes) -> None: ...
    # Of each strip.
    def set_plans(self, plans: Sequence[AttentionPlan], cross: AttentionPlan | None) -> None: ...
    def set_read(self, rows: int, num_rows: int, attention: AttentionPlan) -> None: ...
    def set_tap(self, tap: tuple[int, int, int, int]) -> None: ...
    def set_adapters(self, adapters: StepAdapters) -> None: ...

class StackStream:
    def __init__(self, sum: int, added: int, pending: bool, num_rows: int) -> None: ...
    pending: Final[bool]
    num_rows: Final[int]
    num_experts_read: Final[int]

class StackEmbedding:
    def __init__(self, ids: int, table: PackedMatrix, factor: float, rows: int, num_positions: int) -> None: ...

class LayerStack:
    def __init__(self, hidden: int, narrows: bool) -> None: ...
    def add(self, index: int, sublayers: Sequence[StackSublayer]) -> None: ...
    def run(self, step: StackStep, stream: StackStream, embedding: StackEmbedding | None) -> None: ...

def linear_into_cache(x: int, product: StackProduct, out: int, layer: int, step: StackStep) -> None: ...

# --- csrc/ops: sampling, catalogues, beams

Draw = tuple[float, int, float, float, int, int]  # temperature, top_k, top_p, min_p, seed, choice
Penalties = tuple[float, float, float]  # presence, frequency, repetition
# min_tokens, logit_bias, allowed, bad_words, held_back
TokenBounds = tuple[int, Sequence[tuple[int, float]], Ids | None, Sequence[Ids], Ids]
Logits = tuple[int, int, int, int, int]  # address, N, V, elements between rows, dtype
BeamStep = tuple[int, int, int, int, int]  # cumulative [R], nodes [R] or 0, group_start [G + 1], records [G], G
BeamOutput = tuple[int, int, int, int, int, int]  # score, row, token, logprob [G, K]; bad [R]; K
LogprobOutput = tuple[int, int, int, int]  # of the chosen ones [N], rank [N], best ids [N, K], theirs [N, K]

class Sampler:
    def __init__(self, num_rows: int, vocab_size: int) -> None: ...
    def open_row(
        self, row: int, draw: Draw, penalties: Penalties, bounds: TokenBounds, prompt: Ids, outputs: Ids
    ) -> None: ...
    def close_row(self, row: int) -> None: ...
    def constrain_row(self, row: int, catalogue: Catalogue, end_tokens: Ids, outputs: Ids) -> None: ...
    def resolve(self, ids: int, rows: int, count: int) -> None: ...
    def sample(self, logits: Rows, rows: int, positions: int, masks: int, tokens: int, bad: int) -> None: ...
    def guess(self, logits: Rows, rows: int, positions: int, tokens: int, bad: int) -> None: ...  # no row changes

def logprobs(logits: Logits, chosen: int, top: int, out: LogprobOutput) -> None: ...
def philox4x32(counter: Ids, key: int) -> list[int]: ...  # four words for a counter of four words

class Catalogue:
    def __init__(
        self, tokens: int, offsets: int, num_items: int, width: int, vocab_size: int, num_threads: int
    ) -> None: ...  # `offsets` 0: rows of `width` tokens, padded with -1
    def child(self, node: int, token: int) -> int: ...
    def child_of_each(self, nodes: Ints, tokens: Ints) -> Ints: ...
    def children(self, node: int) -> Ints: ...
    def is_terminal(self, node: int) -> bool: ...
    num_items: Final[int]
    num_bytes: Final[int]
    vocab_size: Final[int]
    tokens: Final[Ints]
    first_child: Final[Ints]
    terminal: Final[Ints]

def beam_candidates(logits: Logits, step: BeamStep, out: BeamOutput) -> None: ...

# --- csrc/attention/cuda: the work list (work_list.h), in every build

class AttentionWork:  # the shape of a step's attention work and the layout of its list
    def __init__(
        self, heads: HeadCounts, mask: Mask, dtype: int, max_sequences: int, max_tokens: int, device: DeviceFacts
    ) -> None: ...
    size: Final[int]  # int32 of the list
    state_rows: Final[int]
    decode_tokens: Final[int]
    workers: Final[int]
    max_merges: Final[tuple[int, int]]  # of decode tiles, of prefill tiles
    ticket_ints: Final[int]
    mail_ints: Final[int]
    sections: Final[tuple[int, int, int]]  # where merges, decode items and prefill items begin
    def use_scratch(self, state_values: int, state_scales: int, tickets: int, mail: int) -> None: ...
    # (decode items, prefill items, merges); block tables may be null.
    def write(self, rows: AttentionBatch, block_size: int, buffer: int) -> tuple[int, int, int]: ...

# --- CUDA: only where with_cuda. Addresses are of device memory unless said otherwise; `stream` is a cudaStream_t.

Matrix = tuple[int, int, int, int]  # address, rows, columns, dtype
TokenIds = tuple[int, int, int, int]  # ids [T], T, last tokens [rows] or 0, rows
HeadNorm = tuple[int, int, float, float]  # weights [D] of queries and keys, eps, what is added to the weights
RmsWeight = tuple[int, float, float]  # weight [H], eps, what is added to the weight
Rotation = tuple[int, int, int]  # positions [T], cosines and sines [P, R] or 0, R
Preparation = tuple[HeadNorm | None, Rotation, int, LayerCache | None]  # the third are slots [T]
Product = tuple[int, int, int, int, int]  # weight [N, K], bias [N] or 0, N, K, scales [N] of float8 or 0
SampledRows = tuple[int, int, int]  # rows [N], positions [N], drafts [N] or 0: nothing was drafted
Sampled = tuple[int, int]  # tokens [N], which of them are bad [N]
TappedNorm = tuple[int, float, HiddenTap | None]  # weight [K], eps
ChainExperts = tuple[Product, int, bool, float]  # router, experts of a row, whether they count 1 together, factor
# Output, norm, gate and up, activation, down; with experts gate and up and down are those of one of them.
ChainTail = tuple[Product, tuple[int, float], Product, int, Product, ChainExperts | None]
ChainHead = tuple[TappedNorm, Product, int]  # norm, qkv, where that goes
ExpertSizes = tuple[int, int, int]  # T, K of E experts to each, E
ExpertRouting = tuple[int, int, int, int, int, bool, float]  # csrc/ops/cuda/expert_route.h
ExpertMatrices = tuple[int, int, int, int, int]  # weight [E, N, D], bias [E, N] or 0, N, D, dtype
ExpertChoice = tuple[int, int, int, ExpertSizes]  # ids and weights [T, K], plan

def cuda_rms_norm(x: Matrix, norm: RmsWeight, residual: int, out: int, tap: HiddenTap | None, stream: int) -> None: ...
def cuda_norm_in_place(x: Matrix, stride: int, norm: RmsWeight, stream: int) -> None: ...
def cuda_tap_rows(x: Matrix, tap: HiddenTap, stream: int) -> None: ...
def cuda_layer_norm(x: Matrix, norm: Norm, residual: int, out: int, tap: HiddenTap | None, stream: int) -> None: ...
def cuda_prepare_qkv(q: Heads, k: Heads, v: Heads | None, dtype: int, steps: Preparation, stream: int) -> None: ...
def cuda_embedding(ids: TokenIds, weight: Matrix, out: int, stream: int) -> None: ...
def cuda_gated_activation(gate_up: Matrix, out: int, activation: int, stream: int) -> None: ...
def cuda_activate(x: int, dtype: int, count: int, activation: int, stream: int) -> None: ...
def cuda_is_skinny_product(num_tokens: int, out_features: int, in_features: int) -> bool: ...
def cuda_is_fused_product(num_tokens: int, out_features: int, in_features: int, normed: bool) -> bool: ...
def cuda_skinny_linear(
    x: Matrix, product: Product, out: int, finish: tuple[int, int], norm: TappedNorm | None, stream: int
) -> None: ...  # `finish`: a SkinnyResult (csrc/ops/cuda/skinny_linear.h) and its activation
def cuda_float8_rows(x: Matrix, codes: int, scales: int, stream: int) -> None: ...
def cuda_can_chain(attended: int, hidden: int, inner: int, in_codes: bool) -> bool: ...
def cuda_can_chain_experts(attended: int, hidden: int, inner: int, num_experts: int, num_chosen: int) -> bool: ...
def cuda_skinny_chain(
    attended: Matrix, residual: int, tail: ChainTail, head: ChainHead | None, scratch: int, stream: int
) -> None: ...
def cuda_expert_plan_bytes(sizes: ExpertSizes) -> int: ...
def cuda_route_experts(logits: int, dtype: int, routing: ExpertRouting, choice: ExpertChoice, stream: int) -> None: ...
def cuda_expert_gated(
    x: int, matrices: ExpertMatrices, choice: ExpertChoice, activation: int, out: int, stream: int
) -> None: ...
def cuda_expert_summed(
    x: int, matrices: ExpertMatrices, choice: ExpertChoice, products: int, out: int, stream: int
) -> None: ...

class CudaLoraSite:  # a, b; ranks, scales, ends; P, R, K, N (csrc/ops/cuda/lora.h)
    def __init__(self, matrices: tuple[int, int], parts: tuple[int, int, int], sizes: tuple[int, ...]) -> None: ...

LoraTiles = tuple[int, int, int]  # rows, tiles, the number of these

def cuda_add_lora(x: int, y: int, shrunk: int, site: CudaLoraSite, tiles: LoraTiles, stream: int) -> None: ...

# Copies inside the cache by pairs in device memory, between two by pairs in the host's.
def cuda_copy_blocks(cache: Blocks, block_bytes: int, pairs: int, num_pairs: int, stream: int) -> None: ...
def cuda_swap_blocks(
    source: Blocks, destination: Blocks, block_bytes: int, pairs: int, num_pairs: int, stream: int
) -> None: ...
def cuda_copy_bytes(destination: int, source: int, num_bytes: int, stream: int) -> None: ...  # host memory is pinned
def cuda_publish(flag: int, value: int) -> None: ...

class CudaLateCopy:
    def __init__(self, flag: int, source: int, destination: int, arrived: int) -> None: ...
    def queue(self, num_bytes: int, value: int, stream: int) -> None: ...
    def wait(self, value: int, stream: int) -> None: ...

class CudaSamplerRows:
    def __init__(self, rows: int, last_tokens: int, num_rows: int) -> None: ...
    def update(self, updates: int, num_updates: int, payload: int, stream: int) -> None: ...
    def sample(self, logits: Logits, by: SampledRows, masks: int, out: Sampled, stream: int) -> None: ...

def cuda_logprobs(logits: Logits, chosen: int, top: int, out: LogprobOutput, stream: int) -> None: ...
def cuda_beam_workspace_bytes(num_rows: int, num_slots: int) -> int: ...
def cuda_beam_candidates(logits: Logits, step: BeamStep, workspace: int, out: BeamOutput, stream: int) -> None: ...
def cuda_prefill_blocks_per_sm(head_dim: int, kv_dtype: int) -> int: ...
def cuda_has_wide_tiles() -> bool: ...
def cuda_can_attend_token(work: AttentionWork) -> bool: ...

class CudaStep:
    def __init__(
        self, work: AttentionWork, block_tables: int, max_blocks: int, work_list: int, launches: tuple[bool, bool, int]
    ) -> None: ...  # `launches`: decode, prefill, the most merges

def cuda_attend_token(
    step: CudaStep, qkv: int, out: int, scores: ScoreRule, steps: Preparation, stream: int
) -> None: ...
def cuda_paged_attention(
    step: CudaStep, q: Heads, out: int, of: LayerCache, scores: ScoreRule, stream: int
) -> None: ...

# --- csrc/cache: block_pool.h, block_table.h, beam_tables.h, swap.h and batch.h are the contracts

class TokenList:  # token ids of a sequence, each in [0, 2^31)
    def __init__(self, tokens: Iterable[int] = ()) -> None: ...
    def append(self, token: int) -> None: ...
    def extend(self, tokens: Iterable[int]) -> None: ...  # all or nothing
    def truncate(self, num_tokens: int) -> None: ...  # Error if the list is shorter
    def common_prefix(self, other: TokenList) -> int: ...  # tokens at the beginning that both have in common
    def fork(self, more: Ids = ()) -> TokenList: ...  # a copy, with more tokens behind it
    def to_list(self) -> list[int]: ...
    def array(self) -> Ints: ...  # a copy
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

class NgramIndex:  # where runs of n tokens or more came before in a text that grows
    def __init__(self, n: int) -> None: ...
    def learn(self, tokens: TokenList) -> None: ...  # what it has beyond what is known; Error if it is shorter
    # Behind the longest run that `tokens` ends with, the latest of equal ones
    def follow(self, tokens: TokenList, most: int) -> tuple[int, ...]: ...
    def run(self, tokens: TokenList) -> int: ...  # how long that run is; 0 if there is none
    def __len__(self) -> int: ...  # of the text

class SuffixIndex:  # the same of the latest `most` tokens of many texts; `most` is a power of two above n
    def __init__(self, n: int, most: int) -> None: ...
    def learn(self, tokens: TokenList, begin: int = 0) -> tuple[int, int]: ...  # where its text begins and ends
    def forget(self, begin: int, end: int) -> None: ...
    def follow(self, tokens: TokenList, most: int) -> tuple[int, ...]: ...  # to the end of a text at most
    def run(self, tokens: TokenList) -> int: ...
    def __len__(self) -> int: ...  # tokens it keeps, and a mark behind each text

class BlockPool:  # block 0, the null block, is never handed out; a freed one stays findable until it is reused
    # hash_bits below 32 make collisions in the prefix index likely, for tests
    def __init__(
        self, num_blocks: int, block_size: int, prefix_index: bool = True, hash_bits: int = 32, strips: Strips = ...
    ) -> None: ...
    windows: Final[list[int]]
    num_strips: Final[int]  # blocks that hold the same tokens
    num_whole_strips: Final[int]  # those of them that keep all tokens
    slides: Final[bool]  # whether others do not
    # The most blocks that a lease of so many tokens holds of strips with windows.
    def most_leased_of_windows(self, num_tokens: int, num_prompt: int) -> int: ...
    num_blocks: Final[int]  # with the null block
    block_size: Final[int]
    num_free: Final[int]
    num_used: Final[int]  # num_blocks - 1 - num_free
    usage: Final[float]  # num_used as a part of what is usable
    num_indexed: Final[int]  # nodes of the prefix index: of a row of blocks each
    num_roots: Final[int]  # salts that have blocks there
    def indexed_blocks(self) -> Ints: ...  # the blocks in the prefix index; O(num_blocks)
    def ref_count(self, block: int) -> int: ...
    def epoch(self, block: int) -> int: ...  # counts how often the block's content was replaced
    # Leading slots that a copy of the open plan may read: its forward and its copies leave them alone.
    def settled_slots(self, block: int) -> int: ...
    # Takes a reference if the block, free or in use, still holds what it held at `epoch`.
    def try_revive(self, block: int, epoch: int) -> bool: ...
    def release(self, block: int) -> None: ...  # gives a reference back
    # Until end_plan() what a reported copy or swap-in reads is not handed out again. What is prepared for writing is
    # not copied: match_partial() passes it over, a write that would copy it is an Error.
    def begin_plan(self) -> None: ...
    def end_plan(self) -> None: ...
    def clear_index(self) -> None: ...  # forgets all prefixes; content and references stay
    def check(self) -> None: ...  # Error naming the first broken invariant; O(num_blocks)

class BlockEpochs:  # (block, epoch) of entries that a table once had, in order; a sequence of pairs serves as one
    def __init__(self, pairs: Sequence[tuple[int, int]] = ()) -> None: ...
    # Those that still hold what they held, up to where nobody can continue from.
    def num_left(self, pool: BlockPool) -> int: ...
    def num_held(self, pool: BlockPool) -> int: ...  # those of them that somebody owns
    def blocks_left(self, pool: BlockPool) -> Ints: ...  # as many blocks as num_left
    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> tuple[int, int]: ...

class BlockTable:  # of one sequence, freed when it is collected; the salt divides the prefix index, compared exactly
    def __init__(self, pool: BlockPool, salt: bytes = b"") -> None: ...
    @staticmethod  # a table of the unbroken beginning of `blocks` that is still there; windows may have gaps
    def adopt(pool: BlockPool, salt: bytes, blocks: BlockEpochs | Sequence[tuple[int, int]]) -> BlockTable: ...
    # What it keeps of its windows: what the next token sees; and what leases keep; everything.
    def keep_window(self) -> None: ...
    def keep_for_lease(self, num_prompt: int) -> None: ...
    def keep_all(self) -> None: ...
    def slide(self, position: int) -> None: ...  # gives back what a sequence that goes on there does not keep
    def servable(self, limit: int) -> int: ...  # the most tokens up to it behind which a sequence can go on
    def copyable(self, num_tokens: int) -> int: ...  # of them, those that end in slots that a plan may copy
    # On an empty table: takes the indexed full rows of tokens[:limit]; returns the tokens they cover.
    def match_prefix(self, tokens: TokenList, limit: int) -> int: ...
    # Then: takes the block that shares the longest head with the tokens that follow; the head's length, 0: nothing.
    def match_partial(self, tokens: TokenList, limit: int) -> int: ...
    def blocks_needed(self, begin: int, end: int) -> int: ...  # that try_prepare_write(begin, end) would take
    # Device blocks that must be free to go on from `computed` to `num_tokens`, with those that are on the host.
    def blocks_to_reach(self, computed: int, num_tokens: int) -> int: ...
    # Appends rows up to num_tokens, with blocks of its own where `present` says so, entry by entry; False: too few.
    def try_append(self, present: Sequence[bool], num_tokens: int) -> bool: ...
    # Makes positions [begin, end) writable; the copies to make first. None: too few blocks, nothing has changed.
    # Positions from `end` on hold nothing afterwards. Blocks that others can see are replaced, never rewritten.
    def try_prepare_write(self, begin: int, end: int) -> Pairs | None: ...
    # Enters the full blocks of tokens[:num_computed] into the prefix index. Cheap to repeat.
    def commit(self, tokens: TokenList, num_computed: int) -> None: ...
    def uncommit(self, from_token: int) -> None: ...  # its own blocks from there on, with all entered below them
    def fork(self) -> BlockTable: ...
    def slice_to(self, num_tokens: int) -> BlockTable: ...  # shares the blocks that cover the first ones
    def truncate(self, num_tokens: int) -> None: ...
    def share_front(self, other: BlockTable, num_rows: int) -> None: ...  # takes the other's, which hold the same
    def free(self) -> None: ...  # idempotent; the table is empty afterwards and can be used again
    def epochs(self) -> BlockEpochs: ...  # of the leading blocks on the device, for adopt()
    blocks: Final[list[int]]  # of the device as b, of the host as -b: engine/cache/entries.py tells them apart
    entries: Final[list[int]]  # the same, row by row, a strip beside the other; 0 where a window has nothing any more
    capacity: Final[int]  # tokens that its rows cover
    num_shared: Final[int]  # blocks that another table holds too
    num_on_host: Final[int]
    resident: Final[bool]  # all are on the device; else it cannot be matched, written, committed or scheduled
    def __len__(self) -> int: ...  # blocks that it holds

class BeamEpochs:  # the BlockEpochs of several ended beams, not yet made objects
    def num_left(self, pool: BlockPool) -> int: ...  # of all beams together
    def __len__(self) -> int: ...
    def __getitem__(self, beam: int) -> BlockEpochs: ...

class BeamTables:  # of a group of beams, which step together; beam i of len() has number i
    def __init__(self, first: BlockTable) -> None: ...  # one beam, which takes over its blocks: it is empty afterwards
    # Beam i continues beam parents[i] with tokens[i], which the next step computes; others give blocks back.
    def reorder(self, parents: Ints, tokens: Ints) -> None: ...
    def blocks_needed(self, position: int) -> int: ...  # that try_prepare_write(position) takes, or more
    # Makes `position` of every beam writable; the copies [C, 2] to make first. None: no room, nothing changed.
    def try_prepare_write(self, position: int) -> Ints | None: ...
    def fork(self, beam: int) -> BlockTable: ...  # shares the beam's blocks
    def blocks(self, beam: int) -> list[int]: ...
    # Beams that end share the blocks of the running ones rows[i] and keep them, at the place that is returned + i.
    def end(self, rows: Ints) -> int: ...
    def take_ended(self, place: int) -> BlockTable: ...  # which is not here any more then
    # Of the first num_tokens[i] positions of the beam that ended at places[i], or of running rows[i] for NO_PLACE.
    def epochs(self, *, places: Ints, rows: Ints, num_tokens: Ints) -> BeamEpochs: ...
    def ended_blocks(self) -> list[list[int]]: ...  # of each place; empty where the table was taken
    def free(self) -> None: ...  # there are no beams afterwards, running or ended
    def __len__(self) -> int: ...

def count_distinct_blocks(tables: Sequence[BlockTable]) -> int: ...  # in both pools, shared ones once

# Moves blocks that only these tables hold, none that the open plan writes or swapped in. None: no room.
def try_swap_out(tables: Sequence[BlockTable], host: BlockPool) -> Pairs | None: ...

# As many of them as fit, at most `most`, tails first.
def swap_out_some(tables: Sequence[BlockTable], host: BlockPool, most: int) -> Pairs: ...
def try_swap_in(tables: Sequence[BlockTable], device: BlockPool) -> Pairs | None: ...  # all of the tables' host blocks

class Batch:  # arrays of a step as StepPlan wants them: T tokens, S sequences, MB columns, G strips
    input_ids: Final[Ints]  # [T]
    input_rows: Final[Ints]  # [T]
    positions: Final[Ints]  # [T]
    query_start: Final[Ints]  # [S + 1]
    seq_lens: Final[Ints]  # [S]
    slot_mapping: Final[npt.NDArray[np.int64]]  # [G, T]
    block_tables: Final[Ints]  # [G, S, MB]

def gather_tables(tables: Sequence[BlockTable]) -> Ints: ...  # [S, MB] of resident ones, padded with block 0

# Sequence i computes positions [computed[i], computed[i] + scheduled[i]), whose blocks are prepared. BeamTables are as
# many sequences of one position each, whose tokens they know themselves. At most one position may lie behind the end of
# tokens[i]: its input_row is last_rows[i], all others are NO_ROW. `room` is (T, S, MB) of the arrays, 0: as many as
# there have to be; padding has slot -1 and rows of length 0.
def prepare_batch(
    tables: Sequence[BlockTable | BeamTables],
    tokens: Sequence[TokenList],
    computed: Ids,
    scheduled: Ids,
    last_rows: Ids,
    room: tuple[int, int, int] = (0, 0, 0),
) -> Batch: ...
