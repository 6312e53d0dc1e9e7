"""Recurrent layers on a GPU: the gated delta rule of Qwen3.6-35B-A3B's sizes beside the bytes of its states.

    python -m benchmarks.gpu_delta_net

A graph holds some layers, each with states of its own, so that the L2 holds none of them when sequences are many.
"""

from __future__ import annotations

import torch

from benchmarks.gpu_engine import read_bandwidth
from bequest.engine.kernels.cuda_delta_net import delta_net
from bequest.engine.kernels.delta_net import DeltaRule, RecurrentStep
from bequest.engine.types.recurrent import DeltaSizes

SIZES = DeltaSizes(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
PROMPTS = ((1, 512), (4, 512), (16, 128), (1, 2048))
SEQUENCES = (1, 8, 64, 256)
REPLAYS = 8


def _rule(layer: int) -> DeltaRule:
    return DeltaRule(
        sizes=SIZES,
        taps=torch.randn(SIZES.conv_width, SIZES.channels, device="cuda"),
        decay=-torch.rand(SIZES.value_heads, device="cuda"),
        step_bias=torch.randn(SIZES.value_heads, device="cuda"),
        norm=torch.ones(SIZES.value_dim, device="cuda"),
        eps=1e-6,
        state_layer=layer,
    )


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def microseconds(num_sequences: int, length: int, num_layers: int) -> float:
    """Of a layer, where each sequence has so many tokens: the median of some replays."""
    num_tokens = num_sequences * length
    slots = [-1] * num_tokens
    for sequence in range(num_sequences):
        slots[(sequence + 1) * length - 1] = num_sequences + sequence
    step = RecurrentStep(
        torch.randn(2 * num_sequences, num_layers, SIZES.state_size, device="cuda"),
        _ints([sequence * length for sequence in range(num_sequences + 1)]),
        _ints(list(range(num_sequences))),
        _ints(slots),
        one_each=length == 1,
    )
    rows = torch.randn(num_tokens, SIZES.row_size, dtype=torch.bfloat16, device="cuda")
    rules = [_rule(layer) for layer in range(num_layers)]
    delta_net(rows, rules[0], step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for rule in rules:
            delta_net(rows, rule, step)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_layers)
    return sorted(times)[len(times) // 2]


def main() -> None:
    bandwidth = read_bandwidth()
    torch.cuda.empty_cache()
    print(f"reads {bandwidth / 1e12:.2f} TB/s")
    print("sequences  tokens of each        us  states, us")
    for num_sequences, length in [*((count, 1) for count in SEQUENCES), *PROMPTS]:
        taken = microseconds(num_sequences, length, num_layers=4 if num_sequences < 256 else 2)
        floor = 2 * num_sequences * SIZES.state_size * 4 / bandwidth * 1e6
        print(f"{num_sequences:9} {length:15} {taken:9.1f} {floor:11.1f}", flush=True)


if __name__ == "__main__":
    main()
