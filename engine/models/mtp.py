"""Multi-token prediction: the head of Qwen3-Next and Qwen3.5, which drafts for the model of its own checkpoint.

It pairs what the target knew at a token, the state behind its last norm, with the token that came next:

    u = fc [ norm(embedding of the next token), norm(state) ]
    h = norm(layer(u))

h takes the place of the target's state, and where the head drafts further it takes the place of the next one, too. The
layer is one of the target's with an attention. Embedding and output are the target's own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bequest.engine.errors import ModelError
from bequest.engine.layers.backend import Backend
from bequest.engine.layers.parts import Norm
from bequest.engine.layers.program import Stack
from bequest.engine.layers.spec import LayerSpec
from bequest.engine.layers.step import LayerStep
from bequest.engine.layers.stream import Stream
from bequest.engine.layers.weight import Weight
from bequest.engine.models.any_config import parse_config, read_config
from bequest.engine.models.config import DecoderConfig
from bequest.engine.models.decoder import Decoder
from bequest.engine.models.dummy import DummySource
from bequest.engine.models.families.dense import describe_layer
from bequest.engine.models.families.parts import Ropes, model_norm
from bequest.engine.models.load import open_files
from bequest.engine.models.naming import as_families_name
from bequest.engine.models.padding import pad_heads
from bequest.engine.models.reader import Lister, Loader, Reader, Shape
from bequest.engine.models.text_part import RenamedSource
from bequest.engine.models.weights import WeightSource, check_shapes

_THEIRS, _OURS = "mtp.", "head."


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a checkpoint has of a head."""

    fuse: Weight  # [H, 2 H]: of a token and a state, side by side
    token_norm: Norm
    state_norm: Norm
    layer: LayerSpec
    norm: Norm


class MtpHead:
    """A Head (engine/runner/head_drafts.py)."""

    def __init__(self, config: DecoderConfig, parts: _Parts, target: Decoder, backend: Backend) -> None:
        """`config`: of its one layer."""
        self.config = config
        self.layers: tuple[int, ...] = (target.config.num_layers,)  # the states behind the last one, normed
        self._parts = parts
        self._target = target
        self._ops = backend.ops
        self._stack: Stack = backend.compile([parts.layer])

    def enter(self, features: Tensor) -> Tensor:
        return features

    def forward(self, ids: Tensor, states: Tensor, step: LayerStep) -> Tensor:
        parts, ops = self._parts, self._ops
        tokens = ops.norm(self._target.start_rows(ids), parts.token_norm, None, None)
        pairs = torch.cat([tokens, ops.norm(states, parts.state_norm, None, None)], dim=1)
        stream = Stream(ops, parts.fuse(pairs))
        self._stack.run(stream, step)
        return stream.normed(parts.norm)

    def logits_of(self, states: Tensor, vocab_size: int) -> Tensor:
        return self._target.logits(states)

    @property
    def num_parameters(self) -> int:
        """That a draft meets, the output among them."""
        config = self.config
        stored = sum(_size(shape) for shape in _expected(config).values()) + config.vocab_size * config.hidden_size
        return stored - (0 if config.experts is None else config.experts.num_idle(config.hidden_size))


def load_mtp(
    path: Path, target: Decoder, backend: Backend, dtype: torch.dtype, num_positions: int, *, dummy: bool = False
) -> MtpHead:
    """Of the checkpoint that the target was loaded from. Raises ModelError."""
    whole = _config_of_target(path)
    config, source = _dummy(whole, backend) if dummy else _opened(path, whole)
    if sizes := backend.head_sizes(dtype):
        config, source = pad_heads(config, source, sizes)
    loader = Loader(source, backend, dtype)
    return MtpHead(config, _describe(config, loader, num_positions), target, backend)


def check_mtp(path: Path, *, dummy: bool = False) -> None:
    """Whether a checkpoint has a head, by the names of its tensors: nobody waits for its weights first. Raises
    ModelError."""
    whole = _config_of_target(path)
    if not dummy:
        _opened(path, whole)


def _config_of_target(path: Path) -> DecoderConfig:
    if not path.is_dir():
        raise ModelError(f"speculative=mtp: {path.name} is one file; its head is read from a directory of safetensors")
    whole = parse_config(read_config(path), str(path / "config.json"))
    if not isinstance(whole, DecoderConfig) or whole.recurrent is None:
        raise ModelError(
            f"speculative=mtp: heads of {whole.architecture} are not read, those of Qwen3-Next and Qwen3.5 are; "
            "set speculative=auto"
        )
    return whole


def _opened(path: Path, whole: DecoderConfig) -> tuple[DecoderConfig, WeightSource]:
    files = open_files(path, whole)
    stored = {_OURS + name.removeprefix(_THEIRS): name for name in files.names() if name.startswith(_THEIRS)}
    if not stored:
        raise ModelError(
            f"speculative=mtp: {files.description} has no head: none of its tensors are {_THEIRS}*; take the "
            "checkpoint as it was published, or set speculative=auto"
        )
    source = as_families_name(RenamedSource(files, stored), whole)
    config = _config_of_head(whole, has_experts=any(".mlp.experts." in name for name in stored))
    check_shapes(source, _seen(source.names()), _expected(config), f"the head ({_THEIRS}*) of {whole.architecture}")
    return config, source


def _dummy(whole: DecoderConfig, backend: Backend) -> tuple[DecoderConfig, WeightSource]:
    config = _config_of_head(whole, has_experts=whole.experts is not None)
    return config, DummySource(_expected(config), backend.device)


def _config_of_head(whole: DecoderConfig, *, has_experts: bool) -> DecoderConfig:
    experts = replace(whole.experts, layers=frozenset({0})) if has_experts and whole.experts is not None else None
    return replace(
        whole,
        num_layers=1,
        sliding_windows=(0,),
        unrotated_layers=frozenset(),
        recurrent=None,
        experts=experts,
        vision=None,
    )


def _describe(config: DecoderConfig, read: Reader, num_positions: int) -> _Parts:
    hidden, at = config.hidden_size, read.under(_OURS)
    return _Parts(
        at.weight("fc", hidden, 2 * hidden),
        model_norm(config, at, "pre_fc_norm_embedding"),
        model_norm(config, at, "pre_fc_norm_hidden"),
        describe_layer(config, at.under("layers.0."), Ropes(config, read, num_positions), 0),
        model_norm(config, at, "norm"),
    )


def _expected(config: DecoderConfig) -> dict[str, Shape]:
    lister = Lister()
    _describe(config, lister, num_positions=1)
    return lister.shapes


def _seen(names: Collection[str]) -> list[str]:
    """Buffers that we compute are no tensors of a head."""
    return [name for name in names if not name.endswith("rotary_emb.inv_freq")]


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()
