"""The work list of attention on a GPU, in every build: csrc/attention/cuda/work_list.h."""

from typing import Final

from .structs import AttentionBatch, DeviceFacts, HeadCounts, Mask

class AttentionWork:  # the shape of a step's attention work and the layout of its list
    def __init__(
        self, heads: HeadCounts, mask: Mask, dtype: int, max_sequences: int, max_tokens: int, device: DeviceFacts
    ) -> None: ...
    size: Final[int]  # int32 of the list
    state_rows: Final[int]
    decode_tokens: Final[int]  # most of a decode tile
    few_tokens: Final[int]  # most of a sequence that has decode tiles
    workers: Final[int]
    max_merges: Final[tuple[int, int]]  # of decode tiles, of prefill tiles
    ticket_ints: Final[int]
    mail_ints: Final[int]
    sections: Final[tuple[int, int, int]]  # where merges, decode items and prefill items begin
    def use_scratch(self, state_values: int, state_scales: int, tickets: int, mail: int) -> None: ...
    # (decode items, prefill items, merges); block tables may be null.
    def write(self, rows: AttentionBatch, block_size: int, buffer: int) -> tuple[int, int, int]: ...
