"""What the engine has to know of a model that transformers computes."""

from __future__ import annotations

from dataclasses import dataclass

from bequest.engine.models.strips import KvHeads, Strips, divide


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """Found by watching the model run (watched.py), where config.json could be read in more than one way."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of the cache; heads of the model may be smaller
    vocab_size: int
    max_position: int  # the longest sequence it can be asked for
    sliding_windows: tuple[int, ...]  # [attentions of a forward]: how many tokens back it sees, itself included; 0: all

    @property
    def strips(self) -> Strips:
        """How the attentions share the blocks of the cache: one plan for each strip."""
        kept = KvHeads(self.num_kv_heads, self.head_dim)
        return divide(self.sliding_windows, [kept] * len(self.sliding_windows))

    @property
    def state_shape(self) -> tuple[int, int]:
        """Recurrent layers, whose states are not kept per token, are refused."""
        return (0, 0)

    def kv_shape(self, block_size: int) -> tuple[int, ...]:
        """[attentions of a strip, 2, NKV, BS, D]: one block of the cache."""
        return self.strips.shapes(block_size)[0]
