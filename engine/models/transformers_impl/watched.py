"""Watches a model run a few tokens: which attentions it has, in which order, and what each of them is given.

Nothing is attended here. What a config.json leaves open (windows, scales, heads, where layers begin) is known
afterwards, as the model's own code has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bequest.engine.errors import ModelError
from bequest.engine.models.transformers_impl.described import refusal
from bequest.engine.models.transformers_impl.interface import AttentionResult, attending, options_of
from bequest.engine.models.transformers_impl.library_model import LibraryModel
from bequest.engine.models.transformers_impl.masks import MaskFunction, SeenMask, window_of

NUM_TOKENS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One attention of a forward."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    soft_cap: float  # of scores; 0: none
    sinks: Tensor | None  # [NQ] float32
    window: int  # tokens back, itself included; 0: all


@dataclass(frozen=True, slots=True)
class Watched:
    calls: tuple[Call, ...]  # in the order of a forward
    layers: tuple[nn.Module, ...]  # what hidden states lie between
    hidden_size: int


class Watcher:
    """Writes down the attentions of one forward."""

    def __init__(self, name: str, num_positions: int) -> None:
        self._name = name  # of the model, for errors
        self._num_positions = num_positions
        self.calls: list[Call] = []

    def mask(self, *_: object, mask_function: MaskFunction, **__: object) -> SeenMask:
        """In the place of transformers' functions that make masks."""
        return SeenMask(window_of(mask_function, self._num_positions))

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object = None,
        **given: object,
    ) -> AttentionResult:
        """In the place of transformers' attention functions: query [1, NQ, T, D], key and value [1, NKV, T, D]."""
        options = options_of(given, key.shape[-1], self._name)
        if key.shape[2] != query.shape[2]:
            raise refusal(self._name, "it attends to other tokens than its own (cross attention, or a memory)")
        self.calls.append(
            Call(
                module,
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                scale=options.scale,
                soft_cap=options.soft_cap,
                sinks=options.sinks,
                window=self._window(attention_mask),
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def _window(self, mask: object) -> int:
        if mask is None:  # the model leaves it to the attention to be causal; the trial shows whether it is
            return 0
        if not isinstance(mask, SeenMask):
            raise refusal(self._name, "it makes attention masks of its own")
        if mask.window is None:
            raise refusal(self._name, "its attention mask is neither causal nor a sliding window")
        return mask.window


def watch(model: LibraryModel, name: str, num_positions: int) -> Watched:
    """Raises ModelError. The name is for errors."""
    base, watcher = model.base, Watcher(name, num_positions)
    with attending(model, watcher.attend, watcher.mask), torch.inference_mode():
        ids = torch.arange(NUM_TOKENS, device=model.device)[None]
        with _recorded_inputs(base) as seen, failures_told(name):
            hidden = base(input_ids=ids, position_ids=ids, use_cache=False).last_hidden_state
    if not watcher.calls:
        raise refusal(name, "its attention does not go through transformers' attention interface")
    layers = _layers(base, watcher.calls, name)
    _check_layers(layers, seen, hidden, name)
    return Watched(tuple(watcher.calls), layers, hidden.shape[-1])


@contextmanager
def failures_told(name: str) -> Iterator[None]:
    """Whatever the code of a model raises is a reason not to serve it."""
    try:
        yield
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if SeenMask.__name__ in str(error):
            raise refusal(name, "it makes something of its own of its attention masks") from error
        raise refusal(name, f"its code fails: {type(error).__name__}: {error}") from error


@contextmanager
def _recorded_inputs(base: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """What each item of each list of modules is called with, in order."""
    seen: list[tuple[nn.Module, Tensor]] = []

    def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if (state := input_state(args, kwargs)) is not None:
            seen.append((module, state))

    lists = [module for module in base.modules() if isinstance(module, nn.ModuleList)]
    handles = [item.register_forward_pre_hook(record, with_kwargs=True) for items in lists for item in items]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def input_state(args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor | None:
    """The hidden states [1, T, H] that a layer is called with."""
    state = args[0] if args else kwargs.get("hidden_states")
    return state if isinstance(state, Tensor) else None


def _layers(base: nn.Module, calls: list[Call], name: str) -> tuple[nn.Module, ...]:
    """The outermost list of modules that all attentions lie in."""
    attentions = {id(call.module) for call in calls}
    for module in base.modules():
        if isinstance(module, nn.ModuleList):
            inside = {id(part) for item in module for part in item.modules()}
            if attentions <= inside:
                return tuple(module)
    raise refusal(name, "its attentions do not lie in one list of layers")


def _check_layers(
    layers: tuple[nn.Module, ...], seen: list[tuple[nn.Module, Tensor]], hidden: Tensor, name: str
) -> None:
    """Each once, in order, over states of one size: hidden states are taken from between them."""
    ids = {id(layer) for layer in layers}
    run = [(module, state) for module, state in seen if id(module) in ids]
    if [id(module) for module, _ in run] != [id(layer) for layer in layers]:
        raise refusal(name, "it does not run each of its layers once, one after another")
    if any(state.shape != hidden.shape for _, state in run):
        raise refusal(name, "its layers and its result are of different sizes")
