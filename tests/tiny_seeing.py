"""Tiny random checkpoints of models that see, complete with tokenizer, template and processor, and odd images."""

from __future__ import annotations

import base64
import functools
import io
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipVisionConfig,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from bequest.engine.types.image import Rgb
from tests.tiny_models import CORPUS, EXPERTS, LINEAR_LAYERS, SHAPE, VOCAB_SIZE, randomised, unset

IMAGE, BEGIN, END = "<image>", "<start_of_image>", "<end_of_image>"
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", IMAGE, AROUND, WHOLE, *TILES, BEGIN, END]
IMAGE_ID = SPECIAL.index(IMAGE)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VIT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SHAPE = {**SHAPE, "max_position_embeddings": 1024}
_CLIP_SIZES = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
_HALF = [0.5, 0.5, 0.5]


def _llava(vision: Any, **fields: Any) -> LlavaForConditionalGeneration:
    text = fields.pop("text", LlamaConfig(**SHAPE))
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_ID, **fields)
    )


def _tiled(config: type[Any], model: type[Any]) -> Any:
    vision = {**VIT, "image_size": 32, "patch_size": 8}
    text = LlamaConfig(**SHAPE).to_dict()
    return model(config(text_config=text, vision_config=vision, scale_factor=2, image_token_id=IMAGE_ID))


def _clip() -> LlavaForConditionalGeneration:
    return _llava(CLIPVisionConfig(**VIT, image_size=28, patch_size=7))


def _clip_full() -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(**VIT, image_size=28, patch_size=7)
    return _llava(
        vision, text=Qwen2Config(**SHAPE), vision_feature_layer=[-1, 1], vision_feature_select_strategy="full"
    )


def _siglip() -> LlavaForConditionalGeneration:
    vision = SiglipVisionConfig(**VIT, image_size=28, patch_size=7)
    return _llava(vision, vision_feature_layer=-1, vision_feature_select_strategy="full", projector_hidden_act="gelu")


def _qwen(config: type[Any], model: type[Any], vision: dict[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**SHAPE, "rope_parameters": rope}
    sizes = {"depth": 3, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, **vision}
    return model(config(text_config=text, vision_config=sizes, image_token_id=IMAGE_ID))


def _qwen2() -> Any:
    return _qwen(Qwen2VLConfig, Qwen2VLForConditionalGeneration, {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2})


def _qwen2_5() -> Any:
    sizes = {"hidden_size": 48, "intermediate_size": 72, "out_hidden_size": 64}
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}
    return _qwen(Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, sizes | windows)


def _gemma3() -> Any:
    """A window that ends within an image, and one image that is longer than the window."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**SHAPE, "head_dim": 16, "sliding_window": 7, "layer_types": types, "query_pre_attn_scalar": 16}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config=text,
            vision_config=SiglipVisionConfig(**VIT, image_size=42, patch_size=7).to_dict(),
            mm_tokens_per_image=9,
            boi_token_index=SPECIAL.index(BEGIN),
            eoi_token_index=SPECIAL.index(END),
            image_token_id=IMAGE_ID,
        )
    )


_ROPE3 = {"rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True}
_VISION3 = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_heads": 4,
    "out_hidden_size": 64,
    "patch_size": 4,
    "num_position_embeddings": 36,
}


def _qwen3() -> Any:
    text = {**SHAPE, "head_dim": 16, "rope_parameters": {**_ROPE3, "mrope_section": [3, 3, 2]}}
    vision = {**_VISION3, "deepstack_visual_indexes": [0, 2]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_ID)
    return Qwen3VLForConditionalGeneration(config)


def _qwen3_moe() -> Any:
    experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    text = {**SHAPE, **experts, "head_dim": 16, "rope_parameters": {**_ROPE3, "mrope_section": [3, 3, 2]}}
    vision = {**_VISION3, "deepstack_visual_indexes": [0, 2]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_ID)
    return Qwen3VLMoeForConditionalGeneration(config)


def _qwen3_5(config: type[Any], model: type[Any], **fields: Any) -> Any:
    rope = {**_ROPE3, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    text = {**SHAPE, **LINEAR_LAYERS, "head_dim": 32, "rope_parameters": rope, "pad_token_id": 1, **fields}
    return model(config(text_config=text, vision_config=_VISION3, image_token_id=IMAGE_ID))


MAKERS: dict[str, Any] = {
    "llava": _clip,
    "llava-full": _clip_full,
    "llava-siglip": _siglip,
    "idefics3": lambda: _tiled(Idefics3Config, Idefics3ForConditionalGeneration),
    "smolvlm": lambda: _tiled(SmolVLMConfig, SmolVLMForConditionalGeneration),
    "qwen2-vl": _qwen2,
    "qwen2.5-vl": _qwen2_5,
    "gemma3": _gemma3,
    "qwen3-vl": _qwen3,
    "qwen3-vl-moe": _qwen3_moe,
    "qwen3.5": lambda: _qwen3_5(Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3.5-moe": lambda: _qwen3_5(Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, **EXPERTS),
}
WITH_EXPERTS = ("qwen3-vl-moe", "qwen3.5-moe")  # otherwise as a model that is here, too
_TILED = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "image_mean": _HALF, "image_std": _HALF}
_GRID = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 2400}}
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"image_processor_type": "CLIPImageProcessor", **_CLIP_SIZES},
    "llava-full": {"image_processor_type": "LlavaImageProcessor", **_CLIP_SIZES, "do_pad": True},
    "llava-siglip": {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 28, "width": 28},
        "resample": 2,
        "image_mean": _HALF,
        "image_std": _HALF,
    },
    "gemma3": {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 42, "width": 42},
        "resample": 2,
        "image_mean": _HALF,
        "image_std": _HALF,
    },
    "idefics3": {"image_processor_type": "Idefics3ImageProcessor", **_TILED},
    "smolvlm": {"image_processor_type": "SmolVLMImageProcessor", **_TILED},
    "qwen2-vl": {"image_processor_type": "Qwen2VLImageProcessor", **_GRID},
    "qwen2.5-vl": {"image_processor_type": "Qwen2VLImageProcessor", **_GRID},
    **{
        name: {"image_processor_type": "Qwen2VLImageProcessor", **_GRID, "image_mean": _HALF, "image_std": _HALF}
        for name in ("qwen3-vl", "qwen3.5", *WITH_EXPERTS)
    },
}


def make_seeing(name: str) -> PreTrainedModel:
    """The model in transformers, float32, the same weights on every call."""
    model = unset(MAKERS[name])
    model.config.hidden_size = SHAPE["hidden_size"]  # whose root the weights are scaled by
    made = randomised(model, name)
    del model.config.hidden_size
    return made


def save_seeing(name: str, directory: Path) -> Path:
    model = make_seeing(name)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[0, 2])
    model.save_pretrained(directory)
    tokenizer = make_tokenizer()
    if name == "gemma3":
        tokenizer.chat_template = TEMPLATE.replace(IMAGE, BEGIN)
    tokenizer.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
    )
    fast.chat_template = TEMPLATE
    return fast


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


# --- images --------------------------------------------------------------------------------------------------------


def picture(height: int, width: int, seed: int = 0) -> Rgb:
    """Waves of colour: neither flat nor noise, which resizing would make flat. Made without Pillow."""
    random = np.random.default_rng(seed)
    rows, columns = np.linspace(0, 6, height)[:, None, None], np.linspace(0, 6, width)[None, :, None]
    speeds, shifts = random.uniform(0.5, 2, (2, 3)), random.uniform(0, 6, (2, 3))
    waves = np.sin(rows * speeds[0] + shifts[0]) * np.sin(columns * speeds[1] + shifts[1])
    return (127.5 + 127 * waves).astype(np.uint8)


def encoded(image: Rgb, kind: str = "PNG") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def image_part(image: Rgb, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(image)), **fields}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


PICTURES = [picture(37, 53, 1), picture(90, 41, 2), picture(28, 28, 3)]


# --- the reference -------------------------------------------------------------------------------------------------


def reference_processor(name: str) -> Any:
    """The library's own, of the kind that resizes as Pillow does."""
    import transformers
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kinds = {
        "CLIPImageProcessor": transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil,
        "LlavaImageProcessor": LlavaImageProcessorPil,
        "SiglipImageProcessor": SiglipImageProcessorPil,
        "Gemma3ImageProcessor": Gemma3ImageProcessorPil,
        "Idefics3ImageProcessor": Idefics3ImageProcessorPil,
        "SmolVLMImageProcessor": SmolVLMImageProcessorPil,
        "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil,
    }
    fields = dict(PROCESSORS[name])
    return kinds[fields.pop("image_processor_type")](**fields)


def plain_pixels(name: str, images: list[Rgb]) -> torch.Tensor:
    """Of images that need no resizing."""
    assert all(image.shape == (28, 28, 3) for image in images)
    norm = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
    norm |= {key: value for key, value in PROCESSORS[name].items() if key in norm}
    values = torch.from_numpy(np.stack(images)).float() / 255
    return ((values - torch.tensor(norm["image_mean"])) / torch.tensor(norm["image_std"])).permute(0, 3, 1, 2)


def reference_pixels(name: str, images: list[Rgb], **options: Any) -> dict[str, torch.Tensor]:
    """What the library's model takes beside the tokens of a prompt with these images; `options` go to its processor."""
    if find_spec("PIL") is None:
        return {"pixel_values": plain_pixels(name, images)}
    from PIL import Image

    made = reference_processor(name)([Image.fromarray(image) for image in images], return_tensors="pt", **options)
    taken = ("pixel_values", "pixel_attention_mask", "image_grid_thw")
    return {key: value for key, value in made.items() if key in taken}
