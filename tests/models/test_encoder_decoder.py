"""Encoder-decoder models against transformers on tiny random weights, in every way of cutting the work into steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from bequest.engine.backends.cpu.backend import CpuBackend
from bequest.engine.kernels.hidden_tap import HiddenTap
from bequest.engine.models.encoder_decoder import EncoderDecoder
from bequest.engine.models.load import LoadedModel, load_model
from tests.models.paged_cross import CrossSequences, EncoderInput, encoder_inputs
from tests.plain_products import plain_products
from tests.tiny_encoder_decoders import (
    TINY_ENCODER_DECODERS,
    VOCAB_SIZE,
    make_encoder_decoder,
    save_encoder_decoder,
)

LENS = (1, 7, 8, 9, 41, 23)  # around a block of the scratch, and past every clamped distance
DECODER_LENS = (5, 33, 1, 17, 4, 20)


@pytest.fixture(scope="module", params=TINY_ENCODER_DECODERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_encoder_decoder(name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def model(loaded: LoadedModel) -> EncoderDecoder:
    assert isinstance(loaded.model, EncoderDecoder)
    return loaded.model


@pytest.fixture(scope="module")
def reference(name: str) -> PreTrainedModel:
    return make_encoder_decoder(name)


@pytest.fixture(scope="module")
def inputs(model: EncoderDecoder) -> list[EncoderInput]:
    return make_inputs(model)


@pytest.fixture(scope="module")
def tokens() -> list[list[int]]:
    return make_tokens()


def make_inputs(model: EncoderDecoder) -> list[EncoderInput]:
    random = torch.Generator().manual_seed(3)
    encoder = model.config.encoder
    if encoder.takes == "audio":
        return [torch.randn(encoder.num_mels, n * encoder.frames_per_state, generator=random) for n in LENS]
    return [torch.randint(VOCAB_SIZE, (n,), generator=random).tolist() for n in LENS]


def make_tokens() -> list[list[int]]:
    random = torch.Generator().manual_seed(4)
    return [torch.randint(VOCAB_SIZE, (n,), generator=random).tolist() for n in DECODER_LENS]


def run_reference(reference: PreTrainedModel, item: EncoderInput, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Encoder states [E, H] and logits [T, V]."""
    result = call(reference, item, tokens)
    return result.encoder_last_hidden_state[0], result.logits[0]


def call(reference: PreTrainedModel, item: EncoderInput, tokens: list[int], **options: Any) -> Any:
    options |= {"decoder_input_ids": torch.tensor([tokens]), "use_cache": False}
    rounds = reference.dtype is torch.bfloat16
    with torch.no_grad(), plain_products() if rounds else nullcontext():
        if not isinstance(item, Tensor):
            return reference(input_ids=torch.tensor([item]), **options)
        # It insists on an input as long as its table of positions.
        encoder = reference.model.encoder
        whole, states = encoder.embed_positions, item.shape[1] // 2
        encoder.embed_positions = torch.nn.Embedding.from_pretrained(whole.weight[:states])
        encoder.config.max_source_positions = states
        result = reference(input_features=item[None], **options)
        encoder.embed_positions = whole
        return result


def assert_near(actual: Tensor, expected: Tensor, relative: float = 2e-5) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < relative, f"relative error {error:.2e}"


def test_a_crowd_of_mixed_lengths(
    loaded: LoadedModel, reference: PreTrainedModel, inputs: list[EncoderInput], tokens: list[list[int]]
) -> None:
    """Encoded in one batch, decoded in one step."""
    sequences = CrossSequences(loaded, inputs, max(DECODER_LENS))
    logits = sequences.step(dict(enumerate(tokens)))
    states = sequences.states.split(sequences.cross_lens.tolist())
    for s, item in enumerate(inputs):
        expected_states, expected_logits = run_reference(reference, item, tokens[s])
        assert_near(states[s], expected_states)
        assert_near(logits[s], expected_logits)


def test_an_input_has_the_same_bits_alone_and_in_a_crowd(
    loaded: LoadedModel, model: EncoderDecoder, inputs: list[EncoderInput]
) -> None:
    together = encoder_inputs(loaded, inputs)
    states = model.encode(together)
    start = 0
    for item, block_size in zip(inputs, (4, 64, 16, 7, 8, 1), strict=True):
        alone = model.encode(encoder_inputs(loaded, [item], block_size))
        assert torch.equal(alone, states[start : start + len(alone)])
        start += len(alone)
    assert start == len(states)


@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_blocks_and_crowds_change_nothing(
    loaded: LoadedModel, inputs: list[EncoderInput], tokens: list[list[int]], chunk: int
) -> None:
    crowd = CrossSequences(loaded, inputs, max(DECODER_LENS)).step(dict(enumerate(tokens)))
    for s in (1, 4, 5):
        alone = CrossSequences(loaded, [inputs[s]], max(DECODER_LENS), block_size=16)
        assert torch.equal(alone.run(0, tokens[s], chunk), crowd[s])


def test_states_of_every_layer(
    loaded: LoadedModel,
    model: EncoderDecoder,
    reference: PreTrainedModel,
    inputs: list[EncoderInput],
    tokens: list[list[int]],
) -> None:
    item, num_layers = inputs[4], model.config.num_layers
    encoder: dict[int, Tensor] = {}
    model.encode(encoder_inputs(loaded, [item]), lambda layer, state: encoder.update({layer: state.clone()}))
    sequences = CrossSequences(loaded, [item], max(DECODER_LENS))
    count = len(tokens[1])
    # Every layer of every token but the second, which wants two.
    wanted = torch.full((count, 2), 0).index_fill_(1, torch.tensor([0]), (1 << (num_layers + 1)) - 1)
    wanted[1, 0] = 0b110
    per_token = num_layers + 1
    first_rows = torch.arange(count, dtype=torch.int32) * per_token
    ring = torch.full((count * per_token, model.config.hidden_size), torch.nan)
    sequences.step({0: tokens[1]}, HiddenTap(first_rows, wanted, ring))
    rows = ring.view(count, per_token, -1)
    assert rows[1, 2:].isnan().all()
    rows[1, :3] = torch.cat([rows[1, 2:3], rows[1, :2]])  # these are of layers 1 and 2
    decoder = {layer: rows[:, layer] for layer in range(per_token)}
    expected = call(reference, item, tokens[1], output_hidden_states=True)
    for states, hidden in ((encoder, expected.encoder_hidden_states), (decoder, expected.decoder_hidden_states)):
        assert sorted(states) == list(range(len(hidden)))
        for layer, state in states.items():
            seen = ~state.isnan().any(1)
            assert seen.sum() >= len(state) - 1
            assert_near(state[seen], hidden[layer][0][seen])


def test_odd_numbers_of_frames(loaded: LoadedModel, model: EncoderDecoder) -> None:
    """The second convolution ends in zeros: one frame more of silence than an even input."""
    if model.config.encoder.takes == "tokens":
        pytest.skip("text has no frames")
    random = torch.randn(model.config.encoder.num_mels, 33)
    states = model.encode(encoder_inputs(loaded, [random]))
    assert states.shape == (17, model.config.hidden_size)
    reference = make_encoder_decoder("whisper").model.encoder
    gelu = torch.nn.functional.gelu
    with torch.no_grad():
        stem = gelu(reference.conv2(gelu(reference.conv1(random[None]))))[0].T
    seen: dict[int, Tensor] = {}
    model.encode(encoder_inputs(loaded, [random]), lambda layer, state: seen.update({layer: state.clone()}))
    embedded = seen[0]
    assert_near(embedded, stem + reference.embed_positions.weight[:17].detach())


@pytest.mark.parametrize("sizes", [(64,), (24, 128)])
def test_padded_heads_compute_the_same(
    name: str, sizes: tuple[int, ...], inputs: list[EncoderInput], tokens: list[list[int]], tmp_path: Path
) -> None:
    class PaddingBackend(CpuBackend):
        def head_sizes(self, dtype: torch.dtype) -> tuple[int, ...]:
            return sizes

    directory = save_encoder_decoder(name, tmp_path)
    plain, padded = (load_model(directory, backend=backend) for backend in (CpuBackend(), PaddingBackend()))
    assert (plain.config.head_dim, padded.config.head_dim) == (16, sizes[0])
    expected, actual = (CrossSequences(one, inputs, 40).step(dict(enumerate(tokens))) for one in (plain, padded))
    for s in actual:
        assert_near(actual[s], expected[s])


def test_bfloat16_weights_and_cache(
    name: str, inputs: list[EncoderInput], tokens: list[list[int]], tmp_path: Path
) -> None:
    reference = make_encoder_decoder(name)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1 and parameter.shape[0] > 8:  # all but norms, biases and the biases of distances
                parameter.copy_(parameter.bfloat16())
    loaded = load_model(save_encoder_decoder(name, tmp_path), dtype="bfloat16")
    actual = CrossSequences(loaded, inputs, max(DECODER_LENS)).step(dict(enumerate(tokens)))
    # Keys and values are rounded, and what meets the units of a chip that has them; there all is rounded.
    rounding = make_encoder_decoder(name).bfloat16()
    ours, theirs = [], []
    for s, item in enumerate(inputs):
        expected = run_reference(reference, item, tokens[s])[1]
        ours.append((actual[s] - expected).square().sum())
        rounded = run_reference(rounding, item.bfloat16() if isinstance(item, Tensor) else item, tokens[s])[1]
        theirs.append((rounded.float() - expected).square().sum())
    assert sum(ours) < sum(theirs)


class ChipWithoutBfloat16(TorchFunctionMode):
    """Warns of products in bfloat16 as torch does on aarch64 where the chip has no instructions for them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.nn.functional.linear and args[0].dtype is torch.bfloat16:
            self.num_products += 1
            if torch.backends.mkldnn.enabled:
                warnings.warn("mkldnn_matmul failed, switching to BLAS gemm", UserWarning, stacklevel=2)
        return function(*args, **(kwargs or {}))


def test_a_reference_in_bfloat16_needs_no_chip_that_has_it(
    name: str, inputs: list[EncoderInput], tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounding = make_encoder_decoder(name).bfloat16()
    item = inputs[4].bfloat16() if isinstance(inputs[4], Tensor) else inputs[4]
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    with ChipWithoutBfloat16() as chip:
        logits = run_reference(rounding, item, tokens[4])[1]
        with pytest.warns(UserWarning, match="switching to BLAS gemm"):
            torch.nn.functional.linear(*torch.ones(2, 16, 16, dtype=torch.bfloat16))
    assert logits.isfinite().all() and chip.num_products > 10
    assert torch.backends.mkldnn.enabled, "it is off for this reference alone"


def test_facts(name: str, loaded: LoadedModel, reference: PreTrainedModel) -> None:
    # named_parameters() names a shared one once.
    read = dict(reference.named_parameters())
    if name == "mbart-apart-untied":
        del read["model.shared.weight"]  # which nobody reads
    assert loaded.num_parameters == sum(parameter.numel() for parameter in read.values())
    assert loaded.weight_bytes >= 4 * sum(p.numel() for p in reference.parameters() if p.dim() == 2 and len(p) > 64)
    assert loaded.max_model_len == loaded.config.max_position
    assert loaded.config.kv_shape(16)[0] == 3


def test_random_weights_in_place_of_files(name: str, loaded: LoadedModel, tmp_path: Path) -> None:
    save_encoder_decoder(name, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    dummy = load_model(tmp_path, dummy=True)
    assert isinstance(dummy.model, EncoderDecoder)
    # Tensors alone say whether stacks have embeddings of their own; without them both have the shared one.
    config = dummy.config
    more = config.vocab_size * config.hidden_size if name == "mbart-apart-untied" else 0
    assert dummy.num_parameters == loaded.num_parameters - more


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tables_of_positions_are_no_format_of_weights(name: str, dtype: str, tmp_path: Path) -> None:
    assert load_model(save_encoder_decoder(name, tmp_path), dtype).formats == (dtype,)
