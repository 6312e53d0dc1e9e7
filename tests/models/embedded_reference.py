"""The embedded model as transformers computes it, on the same dequantised weights."""

from __future__ import annotations

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bequest.engine.formats.gguf_file import GGUFFile
from bequest.engine.models.embedded import embedded_model_path
from bequest.engine.models.gguf_loader import hf_name, layer_names
from bequest.engine.models.gguf_registry import GGUF_ARCHITECTURES
from bequest.engine.models.style import LLAMA


@functools.cache
def embedded_reference() -> LlamaForCausalLM:
    """Configured by hand. The transformers library can read the file too, but takes half a minute for it.

    One for all tests of a process, which must not change it: its codes take longer to decode than most tests."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    weights = {}
    for name, tensor in GGUFFile(embedded_model_path()).tensors.items():
        values = torch.from_numpy(tensor.load())
        if "attn_q" in name or "attn_k" in name:
            # The converter of llama.cpp splits heads of 64 into halves and interleaves them.
            values = values.reshape(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
        weights[hf_name(name, layer_names(LLAMA, GGUF_ARCHITECTURES["llama"]))] = values
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffer is not in the state
    return model.eval()
