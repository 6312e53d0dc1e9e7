"""The C++ core. Addresses are data pointers as integers, 0 for null; dtypes are the codes of csrc/core/dtype.h."""

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

with_cuda: bool

class Error(RuntimeError): ...

def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def isa() -> str: ...
def keep_freed_memory() -> None: ...
def advise_large_pages(address: int, num_bytes: int) -> None: ...
def populate_pages(address: int, num_bytes: int) -> bool: ...

# --- csrc/ops

def pack_weight(
    weight: int, weight_dtype: int, packed: int, format: int, first_row: int, rows: int, in_features: int
) -> None: ...
def pack_quantised(rows: int, bits: int, packed: int, first_row: int, num_rows: int, in_features: int) -> None: ...
def linear(
    x: int,
    weight: int,
    format: int,
    bias: int,
    out: int,
    num_tokens: int,
    out_features: int,
    in_features: int,
    x_stride: int,
) -> None: ...
def finished_linear(
    x: int,
    weight: int,
    format: int,
    bias: int,
    out: int,
    num_tokens: int,
    out_features: int,
    in_features: int,
    x_stride: int,
    gated: bool,
    activation: int,
) -> None: ...
def feed_forward(
    x: int,
    up: int,
    up_bias: int,
    down: int,
    down_bias: int,
    out: int,
    num_tokens: int,
    in_features: int,
    inner_features: int,
    out_features: int,
    activation: int,
    gated: bool,
) -> None: ...
def gather_rows(
    ids: int, weight: int, format: int, out: int, num_tokens: int, out_features: int, in_features: int
) -> None: ...
def rms_norm(
    x: int,
    residual: int,
    weight: int,
    out: int,
    num_tokens: int,
    hidden: int,
    eps: float,
    ring_rows: int,
    layers: int,
    ring: int,
    num_ring_rows: int,
    layer: int,
    store_output: bool,
) -> None: ...
def layer_norm(
    x: int,
    residual: int,
    weight: int,
    bias: int,
    out: int,
    num_tokens: int,
    hidden: int,
    eps: float,
    ring_rows: int,
    layers: int,
    ring: int,
    num_ring_rows: int,
    layer: int,
    store_output: bool,
) -> None: ...
def head_rms_norm(
    x: int, row_stride: int, weight: int, num_tokens: int, num_heads: int, head_dim: int, eps: float
) -> None: ...
def rotary(
    q: int,
    k: int,
    q_stride: int,
    k_stride: int,
    positions: int,
    cos_sin: int,
    num_tokens: int,
    num_positions: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    rotary_dim: int,
) -> None: ...
def gated_activation(gate_up: int, out: int, num_tokens: int, intermediate: int, activation: int) -> None: ...
def activate(x: int, count: int, activation: int) -> None: ...

# --- csrc/attention, KV tensors; kv_sizes is (NB, L, NKV, BS, D)

def write_kv(
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    slots: int,
    num_tokens: int,
    kv_cache: int,
    kv_dtype: int,
    kv_sizes: tuple[int, int, int, int, int],
    layer: int,
    key_factor: float,
    value_factor: float,
) -> None: ...
def copy_blocks(
    source: int,
    source_blocks: int,
    destination: int,
    destination_blocks: int,
    block_bytes: int,
    pairs: int,
    num_pairs: int,
) -> None: ...

class AttentionPlan:
    def __init__(
        self,
        query_start: int,
        seq_lens: int,
        block_tables: int,
        num_sequences: int,
        max_blocks: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_blocks: int,
        causal: bool,
        window: int,
        bfloat16: bool,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_items(self) -> int: ...

def paged_attention(
    q: int,
    q_stride: int,
    out: int,
    kv_cache: int,
    kv_dtype: int,
    kv_sizes: tuple[int, int, int, int, int],
    layer: int,
    scale: float,
    soft_cap: float,
    bias: int,
    bias_reach: int,
    value_scale: float,
    plan: AttentionPlan,
) -> None: ...

# --- csrc/model, layers on the CPU in one call; what these hold is in layer_stack.h

class StackNorm:
    @overload
    def __init__(self) -> None: ...
    @overload
    def __init__(self, weight: int, bias: int, eps: float) -> None: ...

class StackProduct:
    def __init__(self, weight: int, format: int, bias: int, out_features: int, in_features: int) -> None: ...

class StackHeads:
    num_heads: int
    scale: float
    cache_layer: int
    plan: int
    q_norm: int
    k_norm: int
    norm_eps: float
    cos_sin: int
    num_positions: int
    rotary_dim: int
    bias: int
    bias_reach: int
    value_scale: float
    key_factor: float
    value_factor: float

class StackAttention:
    def __init__(self, qkv: StackProduct, heads: StackHeads, output: StackProduct) -> None: ...

class StackCross:
    def __init__(self, q: StackProduct, heads: StackHeads, output: StackProduct) -> None: ...

class StackFeedForward:
    def __init__(self, up: StackProduct, activation: int, down: StackProduct, gated: bool) -> None: ...

class StackSublayer:
    def __init__(
        self,
        mixer: StackAttention | StackCross | StackFeedForward,
        before: StackNorm,
        behind: StackNorm,
        after: StackNorm,
    ) -> None: ...

class StackStep:
    num_tokens: int
    positions: int
    slots: int
    def set_cache(self, kv_cache: int, kv_dtype: int, kv_sizes: tuple[int, int, int, int, int]) -> None: ...
    def set_plans(self, plans: Sequence[AttentionPlan], cross: AttentionPlan | None) -> None: ...
    def set_read(self, rows: int, num_rows: int, attention: AttentionPlan) -> None: ...
    def set_tap(self, tap: tuple[int, int, int, int]) -> None: ...

class StackStream:
    def __init__(self, sum: int, added: int, pending: bool, num_rows: int) -> None: ...
    @property
    def pending(self) -> bool: ...
    @property
    def num_rows(self) -> int: ...

class StackEmbedding:
    def __init__(self, ids: int, table: int, format: int, vocab_size: int, rows: int, num_positions: int) -> None: ...

class LayerStack:
    def __init__(self, hidden: int, narrows: bool) -> None: ...
    def add(self, index: int, sublayers: Sequence[StackSublayer]) -> None: ...
    def run(self, step: StackStep, stream: StackStream, embedding: StackEmbedding | None) -> None: ...

def linear_into_cache(x: int, product: StackProduct, out: int, layer: int, step: StackStep) -> None: ...

# --- csrc/ops, sampling

class Sampler:
    def __init__(self, num_rows: int, vocab_size: int) -> None: ...
    def open_row(
        self,
        row: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        presence_penalty: float,
        frequency_penalty: float,
        repetition_penalty: float,
        seed: int,
        choice: int,
        min_tokens: int,
        logit_bias: Sequence[tuple[int, float]],
        allowed: Sequence[int] | None,
        bad_words: Sequence[Sequence[int]],
        held_back: Sequence[int],
        prompt: Sequence[int],
        outputs: Sequence[int],
    ) -> None: ...
    def close_row(self, row: int) -> None: ...
    def constrain_row(
        self, row: int, catalogue: Catalogue, end_tokens: Sequence[int], outputs: Sequence[int]
    ) -> None: ...
    def resolve(self, ids: int, rows: int, count: int) -> None: ...
    def sample(
        self, logits: int, stride: int, rows: int, positions: int, num: int, masks: int, tokens: int, bad: int
    ) -> None: ...

def logprobs(
    logits: int,
    stride: int,
    num: int,
    vocab_size: int,
    chosen: int,
    top: int,
    chosen_logprob: int,
    rank: int,
    top_ids: int,
    top_logprob: int,
) -> None: ...
def philox4x32(counter: Sequence[int], key: int) -> list[int]:
    """Four words for a counter of four words."""

# --- csrc/ops, catalogues and beams

class Catalogue:
    def __init__(
        self, tokens: int, offsets: int, num_items: int, width: int, vocab_size: int, num_threads: int
    ) -> None:
        """`offsets` 0: rows of `width` tokens, padded with -1."""
    def child(self, node: int, token: int) -> int: ...
    def child_of_each(self, nodes: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]: ...
    def children(self, node: int) -> npt.NDArray[np.int32]: ...
    def is_terminal(self, node: int) -> bool: ...
    @property
    def num_items(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokens(self) -> npt.NDArray[np.int32]: ...
    @property
    def first_child(self) -> npt.NDArray[np.int32]: ...
    @property
    def terminal(self) -> npt.NDArray[np.int32]: ...

beam_group_bytes: int
max_beam_candidates: int

def beam_candidates(
    logits: int,
    stride: int,
    vocab_size: int,
    cumulative: int,
    nodes: int,
    group_start: int,
    groups: int,
    num_groups: int,
    score: int,
    row: int,
    token: int,
    logprob: int,
    bad: int,
    columns: int,
) -> None: ...

# --- CUDA: only where with_cuda. Addresses are of device memory unless said otherwise; `stream` is a cudaStream_t.

cuda_sampler_row_bytes: int
cuda_row_update_bytes: int

def cuda_rms_norm(
    x: int,
    residual: int,
    weight: int,
    out: int,
    dtype: int,
    num_tokens: int,
    hidden: int,
    eps: float,
    ring_rows: int,
    layers: int,
    ring: int,
    num_ring_rows: int,
    layer: int,
    store_output: bool,
    stream: int,
) -> None: ...
def cuda_layer_norm(
    x: int,
    residual: int,
    weight: int,
    bias: int,
    out: int,
    dtype: int,
    num_tokens: int,
    hidden: int,
    eps: float,
    ring_rows: int,
    layers: int,
    ring: int,
    num_ring_rows: int,
    layer: int,
    store_output: bool,
    stream: int,
) -> None: ...
def cuda_prepare_qkv(
    q: int,
    k: int,
    v: int,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    num_tokens: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    q_weight: int,
    k_weight: int,
    eps: float,
    positions: int,
    cos_sin: int,
    rotary_dim: int,
    slots: int,
    kv_cache: int,
    kv_sizes: tuple[int, int, int, int, int],
    layer: int,
    kv_dtype: int,
    key_factor: float,
    value_factor: float,
    dtype: int,
    stream: int,
) -> None: ...
def cuda_gated_activation(
    gate_up: int, out: int, dtype: int, num_tokens: int, intermediate: int, activation: int, stream: int
) -> None: ...
def cuda_activate(x: int, dtype: int, count: int, activation: int, stream: int) -> None: ...
def cuda_skinny_linear(
    x: int,
    weight: int,
    bias: int,
    out: int,
    num_tokens: int,
    out_features: int,
    in_features: int,
    result: int,
    activation: int,
    norm_weight: int,
    eps: float,
    ring_rows: int,
    layers: int,
    ring: int,
    num_ring_rows: int,
    layer: int,
    store_output: bool,
    stream: int,
) -> None: ...
def cuda_skinny_linear_norms(num_tokens: int, in_features: int) -> bool: ...
def cuda_skinny_chain(
    num_tokens: int,
    attended: int,
    residual: int,
    output: tuple[int, int, int, int],
    mlp_norm: tuple[int, float],
    gate_up: tuple[int, int, int, int],
    activation: int,
    down: tuple[int, int, int, int],
    next_norm: tuple[int, float],
    next_qkv: tuple[int, int, int, int],
    qkv: int,
    ring_rows: int,
    layers: int,
    ring: int,
    num_ring_rows: int,
    layer: int,
    store_output: bool,
    scratch: int,
    stream: int,
) -> None: ...
def cuda_can_chain(attended: int, hidden: int, inner: int) -> bool: ...

CHAIN_SCRATCH_BYTES: int

def cuda_embedding(
    ids: int,
    last_tokens: int,
    num_rows: int,
    weight: int,
    out: int,
    dtype: int,
    num_tokens: int,
    vocab_size: int,
    hidden: int,
    stream: int,
) -> None: ...
def cuda_copy_blocks(
    cache: int, num_blocks: int, block_bytes: int, pairs: int, num_pairs: int, stream: int
) -> None: ...
def cuda_late_copy(
    flag: int, value: int, source: int, destination: int, num_bytes: int, arrived: int, stream: int
) -> None: ...
def cuda_wait_for_flag(flag: int, value: int, stream: int) -> None: ...
def cuda_publish(flag: int, value: int) -> None: ...
def cuda_copy_bytes(destination: int, source: int, num_bytes: int, stream: int) -> None:
    """Between pinned host memory and the device's, or inside it; asynchronous."""

def cuda_swap_blocks(
    source: int,
    source_blocks: int,
    destination: int,
    destination_blocks: int,
    block_bytes: int,
    pairs: int,
    num_pairs: int,
    stream: int,
) -> None:
    """`pairs` is in host memory."""

def cuda_update_rows(
    updates: int, num_updates: int, payload: int, rows: int, last_tokens: int, stream: int
) -> None: ...
def cuda_sample(
    logits: int,
    dtype: int,
    stride: int,
    row_ids: int,
    positions: int,
    num: int,
    vocab_size: int,
    num_rows: int,
    rows: int,
    last_tokens: int,
    masks: int,
    tokens: int,
    bad: int,
    stream: int,
) -> None: ...
def cuda_logprobs(
    logits: int,
    dtype: int,
    stride: int,
    num: int,
    vocab_size: int,
    chosen: int,
    top: int,
    chosen_logprob: int,
    rank: int,
    top_ids: int,
    top_logprob: int,
    stream: int,
) -> None: ...

cuda_max_beam_rows: int

def cuda_beam_workspace_bytes(num_rows: int, num_slots: int) -> int: ...
def cuda_beam_candidates(
    logits: int,
    dtype: int,
    stride: int,
    vocab_size: int,
    num_rows: int,
    cumulative: int,
    nodes: int,
    group_start: int,
    groups: int,
    num_groups: int,
    workspace: int,
    score: int,
    row: int,
    token: int,
    logprob: int,
    bad: int,
    columns: int,
    stream: int,
) -> None: ...

# --- csrc/cache

class TokenList:
    """Token ids of a sequence, each in [0, 2^31)."""

    def __init__(self, tokens: Iterable[int] = ()) -> None: ...
    def append(self, token: int) -> None: ...
    def extend(self, tokens: Iterable[int]) -> None:
        """All or nothing."""
    def truncate(self, num_tokens: int) -> None:
        """Error if the list is shorter."""
    def common_prefix(self, other: TokenList) -> int:
        """Tokens at the beginning that both have in common."""
    def fork(self, more: Sequence[int] = ()) -> TokenList:
        """A copy, with more tokens behind it."""
    def to_list(self) -> list[int]: ...
    def array(self) -> npt.NDArray[np.int32]:
        """A copy."""
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

class BlockPool:
    """Blocks by number, 0 (the null block) never handed out. A freed block stays findable until it is reused."""

    def __init__(self, num_blocks: int, block_size: int, prefix_index: bool = True, hash_bits: int = 32) -> None:
        """`hash_bits` below 32 makes collisions in the prefix index likely, for tests."""
    @property
    def num_blocks(self) -> int:
        """With the null block."""
    @property
    def block_size(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_used(self) -> int:
        """num_blocks - 1 - num_free."""
    @property
    def usage(self) -> float:
        """num_used as a part of what is usable."""
    @property
    def num_indexed(self) -> int:
        """Blocks in the prefix index."""
    @property
    def num_roots(self) -> int:
        """Salts that have blocks in the prefix index."""
    def ref_count(self, block: int) -> int: ...
    def epoch(self, block: int) -> int:
        """Counts how often the block's content was replaced."""
    def settled_slots(self, block: int) -> int:
        """Leading slots that a copy of the open plan may read: its forward and its copies leave them alone."""
    def try_revive(self, block: int, epoch: int) -> bool:
        """Takes a reference if the block, free or in use, still holds what it held at `epoch`."""
    def release(self, block: int) -> None:
        """Gives a reference back."""
    def begin_plan(self) -> None:
        """Opens the planning of a step, whose swaps and copies run before its forward, in no order of their own.

        Until end_plan() no block that a reported copy reads (on a host pool: that a swap-in reads) is handed out
        again, and blocks prepared for writing are not copied: match_partial() passes them over, a write that
        would copy one is an Error. Without an open plan the caller has to see to that.
        """
    def end_plan(self) -> None: ...
    def clear_index(self) -> None:
        """Forgets all prefixes; content and references stay."""
    def check(self) -> None:
        """Error naming the first broken invariant. O(num_blocks)."""

class BlockEpochs:
    """(block, epoch) pairs of blocks that a table once had, in order. A sequence of pairs serves as one."""

    def __init__(self, pairs: Sequence[tuple[int, int]] = ()) -> None: ...
    def num_left(self, pool: BlockPool) -> int:
        """How many at the beginning still hold what they held."""
    def num_held(self, pool: BlockPool) -> int:
        """Those of them that somebody owns."""
    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> tuple[int, int]: ...

class BlockTable:
    """The blocks of one sequence. Freed when it is collected. `salt` divides the prefix index, compared exactly."""

    def __init__(self, pool: BlockPool, salt: bytes = b"") -> None: ...
    @staticmethod
    def adopt(pool: BlockPool, salt: bytes, blocks: BlockEpochs | Sequence[tuple[int, int]]) -> tuple[BlockTable, int]:
        """A table of the unbroken beginning of `blocks` that is still there, and its number of blocks."""
    def match_prefix(self, tokens: TokenList, limit: int) -> int:
        """On an empty table: takes the indexed full blocks of tokens[:limit]; returns the tokens they cover."""
    def match_partial(self, tokens: TokenList, limit: int) -> int:
        """After match_prefix: also takes the block that shares the longest head with the tokens that follow.

        Returns the length of that head, in [0, block_size); 0 takes nothing. The sequence has then computed
        match_prefix + match_partial tokens, and try_prepare_write() from there reports the copy of the head.
        """
    def blocks_needed(self, begin: int, end: int) -> int:
        """Blocks that try_prepare_write(begin, end) would take from the pool: growth and copies."""
    def try_prepare_write(self, begin: int, end: int) -> list[tuple[int, int]] | None:
        """Makes positions [begin, end) writable; the (source, destination) copies to make first.

        None if the pool has too few blocks; nothing has changed then. Positions from `end` on hold nothing
        afterwards. Blocks that another table or the prefix index can see are replaced, never rewritten.
        """
    def commit(self, tokens: TokenList, num_computed: int) -> None:
        """Enters the full blocks of tokens[:num_computed] into the prefix index. Cheap to repeat."""
    def uncommit(self, from_token: int) -> None:
        """Takes this table's own blocks from that position on out of the index, with all that was entered below."""
    def fork(self) -> BlockTable: ...
    def slice_to(self, num_tokens: int) -> BlockTable:
        """A table that shares the blocks covering the first `num_tokens`."""
    def truncate(self, num_tokens: int) -> None: ...
    def share_front(self, other: BlockTable, num_blocks: int) -> None:
        """Replaces its first blocks with the other's, which hold the same."""
    def free(self) -> None:
        """Idempotent. The table is empty afterwards and can be used again."""
    def epochs(self) -> BlockEpochs:
        """Of the leading blocks on the device, for adopt()."""
    @property
    def blocks(self) -> list[int]:
        """Block b of the device pool as b, block h of the host pool as -h: engine/cache/entries.py tells them apart."""
    @property
    def num_blocks(self) -> int: ...
    @property
    def num_shared(self) -> int:
        """Blocks that another table holds too."""
    @property
    def num_on_host(self) -> int: ...
    @property
    def resident(self) -> bool:
        """Every block is on the device. A table that is not cannot be matched, written, committed or scheduled."""
    def __len__(self) -> int:
        """num_blocks."""

class BeamEpochs:
    """The BlockEpochs of several ended beams, not yet made objects."""

    def num_left(self, pool: BlockPool) -> int:
        """Of all beams together: how many at the beginning of each still hold what they held."""
    def __len__(self) -> int: ...
    def __getitem__(self, beam: int) -> BlockEpochs: ...

class BeamTables:
    """The block tables of a group of beams, which step together; beam i of len() has number i."""

    def __init__(self, first: BlockTable) -> None:
        """One beam, which takes over the blocks of `first`: that is empty afterwards."""
    def reorder(self, parents: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32]) -> None:
        """Beam i continues beam parents[i] with tokens[i], which the next step computes; others give blocks back."""
    def blocks_needed(self, position: int) -> int:
        """At least the blocks that try_prepare_write(position) takes from the pool."""
    def try_prepare_write(self, position: int) -> npt.NDArray[np.int32] | None:
        """Makes `position` of every beam writable; the copies [C, 2] to make first. None: too few blocks, nothing
        changed."""
    def fork(self, beam: int) -> BlockTable:
        """A table that shares the beam's blocks."""
    def blocks(self, beam: int) -> list[int]: ...
    def end(self, rows: npt.NDArray[np.int32]) -> int:
        """Beams that end share the blocks of the running ones they came from, and keep them: those of rows[i] at place
        `first` + i, where `first` is returned."""
    def take_ended(self, place: int) -> BlockTable:
        """The table of an ended beam, which is not here any more then."""
    def epochs(
        self, *, places: npt.NDArray[np.int32], rows: npt.NDArray[np.int32], num_tokens: npt.NDArray[np.int32]
    ) -> BeamEpochs:
        """Of the blocks of the first num_tokens[i] positions of the ended beam at places[i], or of running beam rows[i]
        where the place is NO_PLACE."""
    def ended_blocks(self) -> list[list[int]]:
        """Of each place; empty where the table was taken."""
    def free(self) -> None:
        """There are no beams afterwards, running or ended."""
    def __len__(self) -> int: ...

def count_distinct_blocks(tables: Sequence[BlockTable]) -> int:
    """Blocks of a request: those of its tables in both pools, shared ones once."""

def try_swap_out(tables: Sequence[BlockTable], host: BlockPool) -> list[tuple[int, int]] | None:
    """Moves the blocks that only `tables` hold to `host`: (device, host) pairs. None: no room, nothing changed.

    Tables that a plan swapped in or prepared for writing are not swapped out by the same plan.
    """

def swap_out_some(tables: Sequence[BlockTable], host: BlockPool, most: int) -> list[tuple[int, int]]:
    """The same for as many of those blocks as fit, at most `most`, tails first. A table may then be in both.

    Blocks that the open plan writes or swapped in stay.
    """

def try_swap_in(tables: Sequence[BlockTable], device: BlockPool) -> list[tuple[int, int]] | None:
    """Brings all host blocks of `tables` back: (host, device) pairs. None: no room, nothing changed."""

class Batch:
    """Arrays of a step as StepPlan wants them. Dims: T tokens, S sequences, MB columns."""

    @property
    def input_ids(self) -> npt.NDArray[np.int32]:
        """[T]"""
    @property
    def input_rows(self) -> npt.NDArray[np.int32]:
        """[T]"""
    @property
    def positions(self) -> npt.NDArray[np.int32]:
        """[T]"""
    @property
    def query_start(self) -> npt.NDArray[np.int32]:
        """[S + 1]"""
    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        """[S]"""
    @property
    def slot_mapping(self) -> npt.NDArray[np.int64]:
        """[T]"""
    @property
    def block_tables(self) -> npt.NDArray[np.int32]:
        """[S, MB]"""

def gather_tables(tables: Sequence[BlockTable]) -> npt.NDArray[np.int32]:
    """[S, MB]: the blocks of tables that are on the device, padded with block 0."""

def prepare_batch(
    tables: Sequence[BlockTable | BeamTables],
    tokens: Sequence[TokenList],
    computed: Sequence[int],
    scheduled: Sequence[int],
    last_rows: Sequence[int],
    columns: int = 0,
    pad_tokens: int = 0,
    pad_rows: int = 0,
) -> Batch:
    """Sequence i computes positions [computed[i], computed[i] + scheduled[i]), whose blocks are prepared.

    BeamTables are as many sequences of one position each, whose tokens they know themselves.
    At most one scheduled position may lie behind the end of tokens[i]; its input_row becomes
    last_rows[i]; other tokens have NO_ROW, and whose sampler row knows nothing has NO_ROW too.
    MB is `columns`, or the largest number of blocks that a sequence has computed tokens in. T and S are
    `pad_tokens` and `pad_rows` where these are not 0: slot -1, rows of length 0.
    """

# --- csrc/attention, on a GPU

class AttentionWork:
    """The shape of a step's attention work and the layout of its list (csrc/attention/cuda/work_list.h)."""

    def __init__(
        self,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: int,
        causal: bool,
        window: int,
        num_multiprocessors: int,
        max_sequences: int,
        max_tokens: int,
        prefill_blocks_per_sm: int,
        wide_tiles: bool,
    ) -> None: ...
    @property
    def size(self) -> int:
        """int32 of the list."""
    @property
    def state_rows(self) -> int: ...
    @property
    def decode_tokens(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def max_merges(self) -> tuple[int, int]:
        """Of decode tiles, of prefill tiles."""
    @property
    def ticket_ints(self) -> int: ...
    @property
    def mail_ints(self) -> int: ...
    @property
    def sections(self) -> tuple[int, int, int]:
        """Where merges, decode items and prefill items begin."""
    def write(
        self,
        query_start: int,
        seq_lens: int,
        block_tables: int,
        num_sequences: int,
        max_blocks: int,
        block_size: int,
        buffer: int,
    ) -> tuple[int, int, int]:
        """(decode items, prefill items, merges); block_tables may be null."""

def prefill_blocks_per_sm(head_dim: int, kv_dtype: int) -> int: ...
def has_wide_tiles() -> bool: ...
def can_attend_token(work: AttentionWork) -> bool: ...
def cuda_attend_token(
    work: AttentionWork,
    qkv: int,
    out: int,
    kv_cache: int,
    kv_dtype: int,
    kv_sizes: tuple[int, int, int, int, int],
    layer: int,
    key_scale: float,
    value_scale: float,
    scale: float,
    q_weight: int,
    k_weight: int,
    eps: float,
    positions: int,
    cos_sin: int,
    rotary_dim: int,
    slots: int,
    block_tables: int,
    max_blocks: int,
    work_list: int,
    stream: int,
) -> None: ...
def cuda_paged_attention(
    work: AttentionWork,
    q: int,
    q_stride: int,
    out: int,
    kv_cache: int,
    kv_dtype: int,
    kv_sizes: tuple[int, int, int, int, int],
    layer: int,
    key_scale: float,
    value_scale: float,
    scale: float,
    soft_cap: float,
    bias: int,
    bias_reach: int,
    block_tables: int,
    max_blocks: int,
    work_list: int,
    state_values: int,
    state_scales: int,
    tickets: int,
    mail: int,
    decode: bool,
    prefill: bool,
    max_merges: int,
    stream: int,
) -> None: ...
