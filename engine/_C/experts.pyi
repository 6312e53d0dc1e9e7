"""Routing to experts and their products: csrc/ops."""

from .ops import PackedMatrix
from .structs import Rows

# top_k, scoring (0 softmax, 1 sigmoid), bias [E] or 0, num_groups, top_groups, group_best, renormalises, factor
RoutingRule = tuple[int, int, int, int, int, int, bool, float]
ChosenExperts = tuple[int, int, int, int]  # ids, weights [T, top_k], T, top_k

class PackedExperts:  # one of each expert, `stride` bytes apart; the address of their biases [E, N], or 0
    def __init__(self, first: PackedMatrix, stride: int, num_experts: int, bias: int) -> None: ...
    site: int  # what adapters know expert 0's by; -1: none

def route_experts(logits: Rows, rule: RoutingRule, ids: int, weights: int) -> None: ...
def expert_gated(gate_up: PackedExperts, chosen: ChosenExperts, x: int, activation: int, out: int) -> None: ...
def expert_summed(down: PackedExperts, chosen: ChosenExperts, x: int, out: int) -> None: ...
def add_gated_rows(rows: Rows, gates: int, weights: int, out: int) -> None: ...
