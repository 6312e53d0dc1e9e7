"""transformers' attention interface: a function under a name, and what the models hand to it.

A model looks its attention function up by the name in its config, and makes masks only where that name has a function
for them too. Each of our functions has a name of its own while it is in use: two models do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from bequest.engine.models.transformers_impl.described import refusal
from bequest.engine.models.transformers_impl.library_model import LibraryModel

AttentionResult = tuple[Tensor, None]  # [1, T, NQ, D], and no weights
AttentionFunction = Callable[..., AttentionResult]
MaskMaker = Callable[..., object]

# What models hand to every attention function, and ours has no use for: masks say what is seen, the plan where.
_UNUSED = frozenset(
    {
        "attention_mask",
        "cache_position",
        "deterministic",
        "dropout",
        "is_causal",
        "layer_idx",
        "position_embeddings",
        "position_ids",
        "sliding_window",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
    }
)
_numbers = count()


@dataclass(frozen=True, slots=True)
class Options:
    scale: float  # of scores
    soft_cap: float  # 0: none
    sinks: Tensor | None  # [NQ] float32: a score per head that takes its share of the softmax and gives nothing


def options_of(given: Mapping[str, object], head_dim: int, name: str) -> Options:
    """Raises ModelError for what our kernels do not know."""
    known = {"scaling", "softcap", "s_aux"}
    if others := sorted(key for key, value in given.items() if key not in known | _UNUSED and value is not None):
        raise refusal(name, f"it needs attention with {', '.join(others)}, which is not supported")
    sinks = given.get("s_aux")
    return Options(
        number(given.get("scaling"), head_dim**-0.5),
        number(given.get("softcap"), 0.0),
        sinks.detach().float().contiguous() if isinstance(sinks, Tensor) else None,
    )


def number(value: object, default: float) -> float:
    """A number or a tensor of one; the default for None."""
    if value is None:
        return default
    assert isinstance(value, (int, float, Tensor)), value
    return float(value)


def install(model: LibraryModel, attend: AttentionFunction, mask: MaskMaker | None = None) -> str:
    """From now on `attend` is the model's attention. Without a function for masks the model makes none. Returns the
    name that it is known by."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = f"bequest_paged_{next(_numbers)}"
    AttentionInterface.register(name, attend)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    model.attention = name
    return name


@contextmanager
def attending(model: LibraryModel, attend: AttentionFunction, mask: MaskMaker | None = None) -> Iterator[None]:
    """The same for a while; then the model attends as before."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    before = model.attention
    name = install(model, attend, mask)
    try:
        yield
    finally:
        model.attention = before
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)
