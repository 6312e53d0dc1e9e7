"""The C++ core. Addresses are data pointers as integers, 0 for null; dtypes are the codes of csrc/core/dtype.h."""

with_cuda: bool

class Error(RuntimeError): ...

def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def isa() -> str: ...

# --- csrc/ops

def pack_weight(
    weight: int, weight_dtype: int, packed: int, packed_dtype: int, first_row: int, rows: int, in_features: int
) -> None: ...
def linear(
    x: int,
    weight: int,
    weight_dtype: int,
    bias: int,
    out: int,
    num_tokens: int,
    out_features: int,
    in_features: int,
) -> None: ...
def gather_rows(
    ids: int, weight: int, weight_dtype: int, out: int, num_tokens: int, out_features: int, in_features: int
) -> None: ...
def rms_norm(x: int, residual: int, weight: int, out: int, num_tokens: int, hidden: int, eps: float) -> None: ...
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
