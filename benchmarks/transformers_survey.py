"""Which causal language models of the installed transformers run here, by whom, and which are refused with which words.

    python -m benchmarks.transformers_survey [--only NAME ...] [--json FILE]

Of each class a tiny model is made: its default configuration with small sizes and random weights. It is saved, loaded
with `--model-impl auto` and, where Bequest has a family of its own, with `--model-impl transformers` too. What is
served is compared with transformers once more, over longer sequences than the trial at loading has.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bequest.engine.errors import ModelError
from bequest.engine.models.impl import Implementation
from bequest.engine.models.load import load_model
from bequest.engine.models.registry import HF_ARCHITECTURES
from bequest.engine.models.transformers_impl.open import open_directory
from tests.models.paged import PagedSequences

VOCAB_SIZE, LENGTH = 320, 41
MOST_PARAMETERS = 40_000_000
# The same sizes under the names that configurations have for them.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size", "attention_hidden_size", "d_embed"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"), 256),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "global_head_dim"), 16),
    **dict.fromkeys(("sliding_window", "attention_window", "window_size"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 16),
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
# Sizes that a configuration may leave open, and its model must have.
OPEN = ("head_dim", "num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group", "n_routed_experts")
# What the sizes above do not fit.
OTHERWISE: dict[str, dict[str, Any]] = {
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]},
    "PLBartForCausalLM": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "WhisperForCausalLM": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
}


@dataclass(frozen=True)
class Row:
    architecture: str
    by: str  # Bequest, transformers, nobody, or not tried
    words: str = ""


def small_config(name: str, config_class: type[Any]) -> Any:
    """The default configuration with small sizes, where it has them."""
    text = config_class().get_text_config(decoder=True)
    values = text.to_dict()
    sizes = {name: size for name, size in SMALL.items() if values.get(name) is not None}
    sizes |= {name: SMALL[name] for name in OPEN if name in values}
    if values.get("qk_rope_head_dim"):
        sizes |= {"head_dim": SMALL["qk_rope_head_dim"], "num_key_value_heads": SMALL["num_attention_heads"]}
    kinds = values.get("layer_types")
    if isinstance(kinds, list) and kinds:
        sizes["layer_types"] = (list(dict.fromkeys(kinds)) * 2)[:2]
    return type(text)(**sizes | OTHERWISE.get(name, {}))


def made(name: str, config_class: type[Any], directory: Path) -> Any:
    model_class = getattr(importlib.import_module("transformers"), name)
    config = small_config(name, config_class)
    with torch.device("meta"):
        count = sum(p.numel() for p in model_class(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.is_floating_point() and "norm" not in key:
                parameter.copy_(0.15 * torch.randn(parameter.shape))
    model.save_pretrained(directory)
    return model


@torch.inference_mode()
def differs(model: Any, directory: Path, impl: str) -> str | None:
    """Serves a sequence in chunks; None: as transformers. Raises ModelError."""
    loaded = load_model(directory, "float32", impl=Implementation(impl))  # type: ignore[arg-type]
    tokens = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(5))
    expected = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    actual = PagedSequences(loaded.model, 1, LENGTH).run(0, tokens.tolist(), chunk=7)
    apart = float((actual - expected).abs().max() / expected.abs().max())
    return None if apart < 1e-3 else f"differs from transformers by {apart:.1e}"


def survey(name: str, config_class: type[Any]) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = made(name, config_class, Path(folder))
        except Exception as error:
            return [_described(name, config_class, Path(folder), error)]
        impls = ("bequest", "transformers") if name in HF_ARCHITECTURES else ("auto",)
        return [_one(name, model, Path(folder), impl) for impl in impls]


def _described(name: str, config_class: type[Any], directory: Path, reason: Exception) -> Row:
    """Of a class that no tiny model could be made of: what its config.json alone leads to."""
    untried = Row(name, "not tried", f"{type(reason).__name__}: {str(reason).splitlines()[0][:100]}")
    try:
        config = config_class()
        config.architectures = [name]
        config.save_pretrained(directory)
    except Exception:
        return untried
    values = json.loads((directory / "config.json").read_text())
    try:
        open_directory(directory, values, max_model_len=256, trust_remote_code=False)
    except ModelError as error:
        return Row(name, "nobody", _words(error, directory))
    return untried


def _words(error: ModelError, directory: Path) -> str:
    return str(error).replace(f"{directory}/config.json: ", "").replace(str(directory), "DIR")


def _one(name: str, model: Any, directory: Path, impl: str) -> Row:
    by = "Bequest" if impl == "bequest" else "transformers"
    try:
        wrong = differs(model, directory, impl)
    except ModelError as error:
        return Row(name, "nobody", _words(error, directory))
    except Exception as error:
        return Row(name, "CRASH", f"{by}: {type(error).__name__}: {str(error)[:160]}")
    return Row(name, by if wrong is None else "WRONG", wrong or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names
    from transformers.utils import logging as library

    logging.disable(logging.WARNING)
    library.set_verbosity_error()
    library.disable_progress_bar()
    warnings.simplefilter("ignore")
    rows, done = [], set()
    for kind, name in names.items():
        if name in done or (options.only and name not in options.only):
            continue
        done.add(name)
        with contextlib.suppress(KeyboardInterrupt):
            found = survey(name, CONFIG_MAPPING[kind])
            rows += found
            for row in found:
                print(f"| {row.architecture} | {row.by} | {row.words} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
