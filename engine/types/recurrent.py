"""Sizes of recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSizes:
    """Of the gated delta rule (csrc/ops/cpu/delta_net.h)."""

    key_heads: int  # HK, of queries and keys
    value_heads: int  # HV: neighbours share a key
    key_dim: int  # DK
    value_dim: int  # DV
    conv_width: int  # CW: tokens that the convolution sees, the token itself included

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """C, of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def row_size(self) -> int:
        """Queries, keys and values, z, and for each value head b (of the rate) and a (of the decay)."""
        return self.channels + self.value_size + 2 * self.value_heads

    @property
    def state_size(self) -> int:
        """Floats of a layer's state: the matrices [HV, DK, DV], then the last inputs of the convolution [CW - 1, C]."""
        return self.value_size * self.key_dim + (self.conv_width - 1) * self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSizes:
    """How many states of recurrent layers there is room for."""

    num_slots: int
    num_lease_slots: int  # of these, that leases may hold
    interval: int  # tokens between two states that are kept on the way
    num_host_slots: int = 0  # in the host's memory, for leases alone; they are numbered behind the others

    @property
    def num_leasable(self) -> int:
        return self.num_lease_slots + self.num_host_slots


@dataclass(frozen=True, slots=True)
class StateLoad:
    """How the slots of states are used."""

    total: int  # on the device
    held: int  # by running sequences and by leases, on the device and on the host
    warm: int  # findable, and held by nobody
    on_host: int = 0  # of those that are held
