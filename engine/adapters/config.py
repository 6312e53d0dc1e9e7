"""adapter_config.json of a PEFT directory: which modules an adapter changes, by how much, and what is refused of it.

A field that would change the result and is not computed here is an error that names it. So is a field that nobody here
knows, unless it is off.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bequest.engine.errors import InvalidAdapter, ModelError
from bequest.engine.models.fields import Fields

FILE = "adapter_config.json"
_ALL_LINEAR = "all-linear"
_LAYER = r".*?\.[^.]*\.(?P<index>\d+)\."  # the first number behind a name is the layer's

# Fields that say how an adapter was trained, or from where it is; and those that are read below.
_OVERLOOKED = frozenset(
    {
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "exclude_modules",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
        "runtime_config",
        "ensure_weight_tying",
    }
)
_READ = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "target_modules",
        "rank_pattern",
        "alpha_pattern",
        "layers_to_transform",
        "layers_pattern",
        "target_parameters",
        "init_lora_weights",
        "bias",
    }
)
_REFUSED = {
    "use_dora": "DoRA's magnitudes are not computed here; train a plain LoRA, or merge it into the model",
    "modules_to_save": "whole modules are not replaced here; merge the adapter into the model",
    "lora_bias": "biases of the low-rank matrices are not added here; train without them",
    "fan_in_fan_out": "matrices that are stored transposed are not supported",
    "trainable_token_indices": "rows of the embedding are not replaced here",
    "layer_replication": "layers are not repeated here",
    "alora_invocation_tokens": "an adapter that begins in the middle of a prompt is not supported",
}
# Of init_lora_weights: those that leave the base model's own matrices alone.
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    rank: int
    alpha: float
    uses_rslora: bool
    targets: str | tuple[str, ...] | None  # a regular expression, names of modules, or all that the file has
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    layers: tuple[int, ...]  # to transform; empty: all
    layers_pattern: tuple[str, ...]
    parameters: tuple[str, ...] = ()  # that are adapted beside modules, such as those of fused experts

    def rank_of(self, module: str) -> int:
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.uses_rslora else rank)

    def has(self, module: str) -> bool:
        """Whether the adapter is of this module."""
        targets = self.targets
        if targets is None:
            return True
        if isinstance(targets, str):
            return targets.lower() == _ALL_LINEAR or re.fullmatch(targets, module) is not None
        if module in targets:
            return True
        if not any(module.endswith(f".{name}") for name in targets):
            return False
        return not self.layers or self._layer_of(module) in self.layers

    def has_parameter(self, name: str) -> bool:
        """The same of a parameter of a module."""
        return any(name == target or name.endswith(f".{target}") for target in self.parameters)

    def _layer_of(self, module: str) -> int | None:
        patterns = [rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\." for pattern in self.layers_pattern] or [_LAYER]
        for pattern in patterns:
            if (match := re.match(pattern, module)) is not None:
                return int(match["index"])
        return None


def read_config(directory: Path) -> LoraConfig:
    """Raises InvalidAdapter."""
    try:
        values = json.loads((directory / FILE).read_text("utf-8"))
    except OSError as error:
        raise InvalidAdapter(f"{FILE} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise InvalidAdapter(f"{FILE} is not JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InvalidAdapter(f"{FILE} is not a JSON object.")
    try:
        return parse_config(values)
    except ModelError as error:
        raise InvalidAdapter(f"{error}.") from None


def parse_config(values: Mapping[str, object]) -> LoraConfig:
    """Raises InvalidAdapter, or ModelError for a field of a wrong type."""
    fields = Fields(values, FILE)
    _refuse(fields)
    rank = fields.integer("r", 8)
    if rank < 1:
        raise InvalidAdapter(f"{FILE}: r is {rank}, but must be at least 1.")
    config = LoraConfig(
        rank=rank,
        alpha=fields.number("lora_alpha", 8),
        uses_rslora=fields.boolean("use_rslora", False),
        targets=_targets(fields),
        rank_pattern={name: int(value) for name, value in _pattern(fields, "rank_pattern").items()},
        alpha_pattern=_pattern(fields, "alpha_pattern"),
        layers=fields.integers("layers_to_transform"),
        layers_pattern=_names(fields, "layers_pattern"),
        parameters=_names(fields, "target_parameters"),
    )
    _check_expressions(config)
    return config


def _refuse(fields: Fields) -> None:
    kind = fields.raw("peft_type", "LORA")
    if kind != "LORA":
        raise InvalidAdapter(f"{FILE}: peft_type is {_shown(kind)}, but only LORA is supported.")
    if (bias := fields.raw("bias", "none")) != "none":
        raise InvalidAdapter(f'{FILE}: bias is {_shown(bias)}, but only "none" is supported: biases are the model\'s.')
    start = fields.raw("init_lora_weights", True)
    if start not in _KEEP_BASE:
        raise InvalidAdapter(
            f"{FILE}: init_lora_weights is {_shown(start)}, which changes the base model's matrices too; convert the "
            "adapter to a plain LoRA when you save it (PEFT's path_initial_model_for_weight_conversion)."
        )
    for name, value in fields.values.items():
        if not value or name in _OVERLOOKED or name in _READ:
            continue
        reason = _REFUSED.get(name, "this field is not supported")
        raise InvalidAdapter(f"{FILE}: {name} is {_shown(value)}, but {reason}.", field=name)


def _targets(fields: Fields) -> str | tuple[str, ...] | None:
    value = fields.raw("target_modules")
    return value if value is None or isinstance(value, str) else _names(fields, "target_modules")


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.raw(name, []) or []
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise InvalidAdapter(f"{FILE}: {name} is {_shown(value)}, but must be a string or a list of strings.")
    return tuple(given)


def _pattern(fields: Fields, name: str) -> dict[str, float]:
    value = fields.raw(name, {})
    if not isinstance(value, dict) or not all(_is_amount(item) for item in value.values()):
        raise InvalidAdapter(f"{FILE}: {name} must be an object of names and numbers over 0, not {_shown(value)}.")
    return value


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _check_expressions(config: LoraConfig) -> None:
    """So that a broken one is found here, and not by the first module that meets it."""
    expressions = [*config.rank_pattern, *config.alpha_pattern, *config.layers_pattern]
    if isinstance(config.targets, str) and config.targets.lower() != _ALL_LINEAR:
        expressions.append(config.targets)
    for expression in expressions:
        try:
            re.compile(expression)
        except re.error as error:
            raise InvalidAdapter(f"{FILE}: {_shown(expression)} is no regular expression: {error}.") from None


def _by_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that ends the module's name; names count from a dot on."""
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default


def _shown(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
