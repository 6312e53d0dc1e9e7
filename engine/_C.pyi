"""The C++ core. Addresses are data pointers as integers, 0 for null; dtypes are the codes of csrc/core/dtype.h."""

from collections.abc import Iterable, Sequence
from typing import Final, overload

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

# --- Structs that are passed as tuples, csrc/bindings/tensors.h

Rows = tuple[int, int, int]  # address, rows, elements between rows; those of a dense [rows, columns] are its columns
Heads = tuple[int, int, int, int, int]  # address, T, heads, D, elements between tokens
Norm = tuple[int, int, float]  # weight and bias [H], 0 without a bias; eps
HiddenTap = tuple[int, int, int, int, int, bool]  # ring rows, layers, ring, rows of the ring; layer, of the output
Blocks = tuple[int, int]  # address, blocks
KvSizes = tuple[int, int, int, int, int]  # NB, L, NKV, BS, D
LayerCache = tuple[KvCacheView, int, float, float]  # cache, layer, what its keys and values are to be multiplied by
ScoreRule = tuple[float, float, int, int]  # scale, soft cap (0: none), bias [NQ, 2 R + 1] (0: none), R
HeadCounts = tuple[int, int, int]  # NQ, NKV, D
Mask = tuple[bool, int]  # causal, window (0: none)
AttentionBatch = tuple[int, int, int, int, int]  # query_start [S + 1], seq_lens [S], block_tables [S, MB], S, MB

# --- csrc/ops

class PackedMatrix:
    """A weight [N, K] in a format of csrc/ops/cpu/linear.h."""

    def __init__(self, data: int, format: int, out_features: int, in_features: int) -> None: ...
    def pack(self, rows: int, dtype: int, first_row: int, num_rows: int) -> None: ...
    def pack_quantised(self, rows: int, bits: int, first_row: int, num_rows: int) -> None: ...

def linear(x: Rows, weight: PackedMatrix, bias: int, out: int) -> None: ...
def finished_linear(x: Rows, weight: PackedMatrix, bias: int, out: int, activation: int, gated: bool) -> None: ...
def feed_forward(
    x: Rows, up: tuple[PackedMatrix, int], down: tuple[PackedMatrix, int], out: int, activation: int, gated: bool
) -> None:
    """A matrix comes with the address of its bias."""

def gather_rows(ids: int, num_tokens: int, weight: PackedMatrix, out: int) -> None: ...
def rms_norm(x: Rows, norm: Norm, residual: int, out: int, tap: HiddenTap | None) -> None: ...
def layer_norm(x: Rows, norm: Norm, residual: int, out: int, tap: HiddenTap | None) -> None: ...
def head_rms_norm(x: Heads, weight: int, eps: float) -> None: ...
def rotary(q: Heads, k: Heads, positions: int, cos_sin: Rows) -> None: ...
def gated_activation(gate_up: int, out: int, num_tokens: int, intermediate: int, activation: int) -> None: ...
def activate(x: int, count: int, activation: int) -> None: ...

# --- csrc/attention, KV tensors

class KvCacheView:
    """A cache tensor [NB, L, 2, NKV, BS, D]."""

    def __init__(self, data: int, dtype: int, sizes: KvSizes) -> None: ...

def write_kv(k: Rows, v: Rows, slots: int, to: LayerCache) -> None: ...
def copy_blocks(source: Blocks, destination: Blocks, block_bytes: int, pairs: int, num_pairs: int) -> None: ...

class AttentionPlan:
    def __init__(
        self, batch: AttentionBatch, heads: HeadCounts, mask: Mask, block_size: int, num_blocks: int, bfloat16: bool
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_items(self) -> int: ...

def paged_attention(q: Rows, out: int, of: LayerCache, plan: AttentionPlan, scores: ScoreRule) -> None: ...

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

Draw = tuple[float, int, float, float, int, int]  # temperature, top_k, top_p, min_p, seed, choice
Penalties = tuple[float, float, float]  # presence, frequency, repetition
# min_tokens, logit_bias, allowed, bad_words, held_back
TokenBounds = tuple[int, Sequence[tuple[int, float]], Sequence[int] | None, Sequence[Sequence[int]], Sequence[int]]
Logits = tuple[int, int, int, int, int]  # address, N, V, elements between rows, dtype
LogprobOutput = tuple[int, int, int, int]  # of the chosen ones [N], rank [N], best ids [N, K], theirs [N, K]

class Sampler:
    def __init__(self, num_rows: int, vocab_size: int) -> None: ...
    def open_row(
        self,
        row: int,
        draw: Draw,
        penalties: Penalties,
        bounds: TokenBounds,
        prompt: Sequence[int],
        outputs: Sequence[int],
    ) -> None: ...
    def close_row(self, row: int) -> None: ...
    def constrain_row(
        self, row: int, catalogue: Catalogue, end_tokens: Sequence[int], outputs: Sequence[int]
    ) -> None: ...
    def resolve(self, ids: int, rows: int, count: int) -> None: ...
    def sample(self, logits: Rows, rows: int, positions: int, masks: int, tokens: int, bad: int) -> None: ...

def logprobs(logits: Logits, chosen: int, top: int, out: LogprobOutput) -> None: ...
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

# Of the rows: cumulative scores [R], nodes [R] or 0; group_start [G + 1], records [G], G.
BeamStep = tuple[int, int, int, int, int]
BeamOutput = tuple[int, int, int, int, int, int]  # score, row, token, logprob [G, K]; bad [R]; K

def beam_candidates(logits: Logits, step: BeamStep, out: BeamOutput) -> None: ...

# --- csrc/attention/cuda: the work list, in every build

class AttentionWork:
    """The shape of a step's attention work and the layout of its list (csrc/attention/cuda/work_list.h)."""

    def __init__(
        self,
        heads: HeadCounts,
        mask: Mask,
        dtype: int,
        max_sequences: int,
        max_tokens: int,
        device: tuple[int, int, bool],
    ) -> None:
        """`device`: its multiprocessors, cuda_prefill_blocks_per_sm, cuda_has_wide_tiles."""
    size: Final[int]  # int32 of the list
    state_rows: Final[int]
    decode_tokens: Final[int]
    workers: Final[int]
    max_merges: Final[tuple[int, int]]  # of decode tiles, of prefill tiles
    ticket_ints: Final[int]
    mail_ints: Final[int]
    sections: Final[tuple[int, int, int]]  # where merges, decode items and prefill items begin
    def use_scratch(self, state_values: int, state_scales: int, tickets: int, mail: int) -> None: ...
    def write(self, rows: AttentionBatch, block_size: int, buffer: int) -> tuple[int, int, int]:
        """(decode items, prefill items, merges); block tables may be null."""

# --- CUDA: only where with_cuda. Addresses are of device memory unless said otherwise; `stream` is a cudaStream_t.

Matrix = tuple[int, int, int, int]  # address, rows, columns, dtype
TokenIds = tuple[int, int, int, int]  # ids [T], T, last tokens [rows] or 0, rows
HeadNorm = tuple[int, int, float]  # weights [D] of queries and keys, eps
Rotation = tuple[int, int, int]  # positions [T], cosines and sines [P, R] or 0, R
Preparation = tuple[HeadNorm | None, Rotation, int, LayerCache | None]  # the third are slots [T]
Product = tuple[int, int, int, int]  # weight [N, K], bias [N] or 0, N, K
TappedNorm = tuple[int, float, HiddenTap | None]  # weight [K], eps
ChainTail = tuple[Product, tuple[int, float], Product, int, Product]  # output, norm, gate and up, activation, down
ChainHead = tuple[TappedNorm, Product, int]  # norm, qkv, where that goes

def cuda_rms_norm(x: Matrix, norm: Norm, residual: int, out: int, tap: HiddenTap | None, stream: int) -> None: ...
def cuda_layer_norm(x: Matrix, norm: Norm, residual: int, out: int, tap: HiddenTap | None, stream: int) -> None: ...
def cuda_prepare_qkv(
    q: Heads, k: Heads, v: Heads | None, dtype: int, preparation: Preparation, stream: int
) -> None: ...
def cuda_embedding(ids: TokenIds, weight: Matrix, out: int, stream: int) -> None: ...
def cuda_gated_activation(gate_up: Matrix, out: int, activation: int, stream: int) -> None: ...
def cuda_activate(x: int, dtype: int, count: int, activation: int, stream: int) -> None: ...

cuda_most_streamed_rows: int
cuda_most_chained_rows: int
cuda_chain_scratch_bytes: int

def cuda_is_skinny_product(num_tokens: int, out_features: int, in_features: int) -> bool: ...
def cuda_is_fused_product(num_tokens: int, out_features: int, in_features: int, normed: bool) -> bool: ...
def cuda_skinny_linear(
    x: Matrix, product: Product, out: int, finish: tuple[int, int], norm: TappedNorm | None, stream: int
) -> None:
    """`finish`: a SkinnyResult (csrc/ops/cuda/skinny_linear.h) and its activation."""

def cuda_can_chain(attended: int, hidden: int, inner: int) -> bool: ...
def cuda_skinny_chain(
    attended: Matrix, residual: int, tail: ChainTail, head: ChainHead | None, scratch: int, stream: int
) -> None: ...
def cuda_copy_blocks(cache: Blocks, block_bytes: int, pairs: int, num_pairs: int, stream: int) -> None: ...
def cuda_swap_blocks(
    source: Blocks, destination: Blocks, block_bytes: int, pairs: int, num_pairs: int, stream: int
) -> None:
    """`pairs` is in host memory."""

def cuda_copy_bytes(destination: int, source: int, num_bytes: int, stream: int) -> None:
    """Between pinned host memory and the device's, or inside it; asynchronous."""

class CudaLateCopy:
    def __init__(self, flag: int, source: int, destination: int, arrived: int) -> None: ...
    def queue(self, num_bytes: int, value: int, stream: int) -> None: ...
    def wait(self, value: int, stream: int) -> None: ...

def cuda_publish(flag: int, value: int) -> None: ...

cuda_sampler_row_bytes: int
cuda_row_update_bytes: int

class CudaSamplerRows:
    def __init__(self, rows: int, last_tokens: int, num_rows: int) -> None: ...
    def update(self, updates: int, num_updates: int, payload: int, stream: int) -> None: ...
    def sample(
        self, logits: Logits, row_ids: int, positions: int, masks: int, out: tuple[int, int], stream: int
    ) -> None:
        """`out`: tokens [N], and which are bad [N]."""

def cuda_logprobs(logits: Logits, chosen: int, top: int, out: LogprobOutput, stream: int) -> None: ...

cuda_max_beam_rows: int

def cuda_beam_workspace_bytes(num_rows: int, num_slots: int) -> int: ...
def cuda_beam_candidates(logits: Logits, step: BeamStep, workspace: int, out: BeamOutput, stream: int) -> None: ...
def cuda_prefill_blocks_per_sm(head_dim: int, kv_dtype: int) -> int: ...
def cuda_has_wide_tiles() -> bool: ...
def cuda_can_attend_token(work: AttentionWork) -> bool: ...

class CudaStepWork:
    def __init__(
        self, work: AttentionWork, block_tables: int, max_blocks: int, work_list: int, launches: tuple[bool, bool, int]
    ) -> None:
        """`launches`: decode, prefill, the most merges."""

def cuda_attend_token(
    step: CudaStepWork, qkv: int, out: int, scale: float, preparation: Preparation, stream: int
) -> None: ...
def cuda_paged_attention(
    step: CudaStepWork, q: Heads, out: int, of: LayerCache, scores: ScoreRule, stream: int
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
    room: tuple[int, int, int] = (0, 0, 0),
) -> Batch:
    """Sequence i computes positions [computed[i], computed[i] + scheduled[i]), whose blocks are prepared.

    BeamTables are as many sequences of one position each, whose tokens they know themselves.
    At most one scheduled position may lie behind the end of tokens[i]; its input_row becomes
    last_rows[i]; other tokens have NO_ROW, and whose sampler row knows nothing has NO_ROW too.
    `room` is (T, S, MB) of the arrays, 0: as large as they need be. Padding has slot -1 and rows of length 0.
    """
