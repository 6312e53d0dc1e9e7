"""Tiny random checkpoints of every supported architecture, complete with tokenizer and chat template, so that anything
from a layer to the whole server can be tested against the transformers library."""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GenerationConfig,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.initialization import no_init_weights

VOCAB_SIZE = 320
END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "a finished request leaves its cache to the next request",
    "The cat sat on the mat, and the rat ran after the cat; 1234567890 times!",
)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
# Sizes of recurrent layers that no vector divides, with keys that value heads share.
LINEAR_LAYERS = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
# Layers of two kinds of heads; those that see all turn a half of their pairs.
GEMMA4: dict[str, Any] = SHAPE | {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
    "pad_token_id": 1,
}
# The last layers read the keys and values of others, and have wider MLPs; every layer gets something of each token.
GEMMA4_SHARED = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention", "full_attention"] * 3, "full_attention"],
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24}
GEMMA4_KEYS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
WIDE_EXPERTS = {"hidden_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
BIASES = {"attention_bias": True, "mlp_bias": True}

# name → (model class, its configuration)
TINY_MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama-biases-tied-mha-gelu": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE | BIASES | {"num_key_value_heads": 4, "hidden_act": "gelu", "tie_word_embeddings": True}),
    ),
    "llama-odd-head": (LlamaForCausalLM, LlamaConfig(**SHAPE, head_dim=24, hidden_act="gelu_pytorch_tanh")),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LINEAR)),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=8)),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig(
            **SHAPE,
            head_dim=16,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
    ),
    # Queries grow from the twelfth token on.
    "ministral3": (
        Ministral3ForCausalLM,
        Ministral3Config(
            **SHAPE,
            head_dim=16,
            rope_parameters=YARN | {"original_max_position_embeddings": 12, "llama_4_scaling_beta": 0.4},
        ),
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config(**SHAPE, tie_word_embeddings=True, use_sliding_window=True, sliding_window=12, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32)),
    # Layers without positions: the second of three, with a window; and by the interval.
    "smollm3": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=10, pad_token_id=1),
    ),
    "smollm3-interval": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**SHAPE, no_rope_layer_interval=2, tie_word_embeddings=False, pad_token_id=1),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SHAPE, sliding_window=9, pad_token_id=1)),
    # Beyond the length in training, and never so.
    "phi3-long": (
        Phi3ForCausalLM,
        Phi3Config(**SHAPE, rope_parameters=LONG, original_max_position_embeddings=16, pad_token_id=1),
    ),
    "phi3-short": (
        Phi3ForCausalLM,
        Phi3Config(
            **SHAPE,
            rope_parameters=LONG | {"original_max_position_embeddings": 256},
            original_max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=1,
        ),
    ),
    "glm": (GlmForCausalLM, GlmConfig(**SHAPE, head_dim=16, pad_token_id=1)),
    "glm4": (Glm4ForCausalLM, Glm4Config(**SHAPE, head_dim=32, attention_bias=False, pad_token_id=1)),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(
            **SHAPE,
            embedding_multiplier=3.0,
            residual_multiplier=0.22,
            attention_multiplier=0.1,
            logits_scaling=6.0,
            tie_word_embeddings=True,
            pad_token_id=1,
        ),
    ),
    "gemma": (GemmaForCausalLM, GemmaConfig(**SHAPE, head_dim=32, pad_token_id=1)),
    # Scores and logits that reach their soft caps.
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **SHAPE,
            head_dim=16,
            query_pre_attn_scalar=10,
            sliding_window=9,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            pad_token_id=1,
        ),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **SHAPE,
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=6,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            pad_token_id=1,
        ),
    ),
    "gemma4": (Gemma4ForCausalLM, Gemma4TextConfig(**GEMMA4)),
    "gemma4-keys": (Gemma4ForCausalLM, Gemma4TextConfig(**GEMMA4 | GEMMA4_KEYS, attention_bias=True)),
    "gemma4-shared": (Gemma4ForCausalLM, Gemma4TextConfig(**GEMMA4 | GEMMA4_SHARED)),
    "gemma4-experts": (Gemma4ForCausalLM, Gemma4TextConfig(**GEMMA4 | GEMMA4_KEYS | GEMMA4_EXPERTS)),
    # Norms that subtract the mean; attention and MLP side by side; layers that see all know no positions.
    "cohere": (CohereForCausalLM, CohereConfig(**SHAPE, logit_scale=0.5, attention_bias=True, pad_token_id=1)),
    "cohere-plus": (CohereForCausalLM, CohereConfig(**SHAPE, use_qk_norm=True, logit_scale=0.25, pad_token_id=1)),
    "cohere2": (
        Cohere2ForCausalLM,
        Cohere2Config(
            **SHAPE,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            pad_token_id=1,
        ),
    ),
    # Norms behind sublayers alone, and over all heads of queries and of keys.
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SHAPE, attention_bias=True)),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config(
            **SHAPE,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        ),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=3)),
    # Sinks, windows in turns, biases everywhere, gates and ups that are clamped: some reach the limit.
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **SHAPE,
            head_dim=16,
            num_local_experts=6,
            num_experts_per_tok=3,
            sliding_window=9,
            rope_parameters={**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            pad_token_id=1,
        ),
    ),
    # Dense layers among those with experts, shared experts, windows.
    "qwen2-moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SHAPE,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            shared_expert_intermediate_size=72,
            mlp_only_layers=[1],
            use_sliding_window=True,
            sliding_window=11,
        ),
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SHAPE,
            head_dim=32,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=32,
            norm_topk_prob=True,
            decoder_sparse_step=2,
        ),
    ),
    "qwen3.5": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(**SHAPE | LINEAR_LAYERS, head_dim=32, tie_word_embeddings=True, pad_token_id=1),
    ),
    # The last layer has an attention, of which some rows are read; the sizes of published models.
    "qwen3.5-wide": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            **SHAPE
            | {
                "layer_types": ["linear_attention", "linear_attention", "full_attention"],
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "attention_bias": True,
            },
            head_dim=64,
            pad_token_id=1,
        ),
    ),
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **SHAPE | LINEAR_LAYERS | EXPERTS, head_dim=64, mlp_only_layers=[0], norm_topk_prob=False, pad_token_id=1
        ),
    ),
    "qwen3.5-moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(**SHAPE | LINEAR_LAYERS | EXPERTS, head_dim=32, pad_token_id=1),
    ),
    # Groups of experts, a bias for choosing, shared experts without a gate, a dense layer before the others.
    "glm4-moe": (
        Glm4MoeForCausalLM,
        Glm4MoeConfig(
            **SHAPE,
            head_dim=32,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            num_mtp_layers=0,
            pad_token_id=1,
        ),
    ),
    # Head dims that tensor-core attention serves.
    "llama-head-64": (LlamaForCausalLM, LlamaConfig(**SHAPE, head_dim=64)),
    "qwen3-head-128": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=128)),
    # Of a size that a GPU has one kernel for all layers of.
    "qwen3-stacked": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE | {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4}, head_dim=128),
    ),
    "gemma4-64": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(**GEMMA4 | GEMMA4_KEYS | {"head_dim": 64, "global_head_dim": 128}),
    ),
    # The heads of published models.
    "gemma4-256": (
        Gemma4ForCausalLM,
        Gemma4TextConfig(**GEMMA4 | GEMMA4_SHARED | {"head_dim": 256, "global_head_dim": 512}),
    ),
    # Wide enough for the products that a GPU chains.
    "qwen2-wide": (Qwen2ForCausalLM, Qwen2Config(**SHAPE | {"hidden_size": 256, "intermediate_size": 512})),
    "llama-wide": (LlamaForCausalLM, LlamaConfig(**SHAPE | {"hidden_size": 512, "intermediate_size": 512})),
    "qwen3-moe-wide": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SHAPE | WIDE_EXPERTS, head_dim=64, norm_topk_prob=True),
    ),
    "qwen3.5-moe-wide": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(
            **SHAPE | WIDE_EXPERTS,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            shared_expert_intermediate_size=256,
            head_dim=64,
            pad_token_id=1,
        ),
    ),
}


def make_reference(name: str) -> PreTrainedModel:
    """The model in transformers, float32, the same weights on every call."""
    model_class, config = TINY_MODELS[name]
    # It keeps its config, and tests change it there.
    return randomised(unset(lambda: model_class(copy.deepcopy(config))), name)


def unset(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """What it makes, with whatever was in memory for weights: drawing those that are drawn again takes a third of it
    all."""
    with no_init_weights():
        model = make()
    model.tie_weights()
    return model


def randomised(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """With weights that depend on the name alone."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    scale = 1.2 * model.config.hidden_size**-0.5
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Wide enough that a mistake anywhere shows in the logits; norms and biases are not left at 1 and 0.
            centre = 1.0 if _is_about_one(parameter_name, model.config.model_type) else 0.0
            # Keys are made out of a convolution and scaled to length one: small ones would be nothing but rounding.
            width = 4.0 * scale if "conv1d" in parameter_name else scale
            # Some of gpt-oss' gates are to reach their limit.
            width = 25.0 * scale if parameter_name.endswith("gate_up_proj_bias") else width
            parameter.copy_(centre + width * torch.randn(parameter.shape, generator=random))
            if model.config.model_type.startswith("gemma4"):
                parameter.mul_(_gemma4_factor(parameter_name, parameter))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("correction_bias"):
                buffer.copy_(scale * torch.randn(buffer.shape, generator=random))
            if buffer_name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=random))
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # others may leave the cap out
    return model.eval()


def _gemma4_factor(name: str, parameter: torch.Tensor) -> float:
    """Nothing else scales its scores: without these one key would take all of an attention, and experts would score
    alike."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return float(1.5 * len(parameter) ** -0.25)
    return float(len(parameter) ** 0.5) if name.endswith("router.scale") else 1.0


def _is_about_one(parameter: str, model_type: str) -> bool:
    """Gemma's norms add a 1 themselves, but for those of Gemma 4."""
    if model_type.startswith("gemma4"):
        return "norm" in parameter or parameter.endswith("scale")
    return "norm" in parameter and not model_type.startswith("gemma")


def save_tiny_model(name: str, directory: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Writes what a download from the Hugging Face hub would hold; `options` go to save_pretrained."""
    return save_checkpoint(make_reference(name).to(dtype), directory, **options)


def save_checkpoint(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """With a tokenizer and a chat template."""
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[0, 2])
    model.save_pretrained(directory, **options)
    make_tokenizer().save_pretrained(directory)
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token=END_OF_TEXT,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@functools.cache
def _trained() -> str:
    """Training takes as long as writing the model: each process does it once."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())
