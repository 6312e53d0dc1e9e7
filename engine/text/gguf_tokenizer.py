"""A tokenizer from the tokenizer.ggml.* fields of a GGUF file.

The file holds the vocabulary and the merges but not the rules that cut a text into words before merging: it only names
them (`tokenizer.ggml.pre`). What each name means is written down here; a name that is not is an error, because other
rules would give plausible but wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from bequest.engine.errors import ModelError
from bequest.engine.text.spelling import SPACE_MARK
from bequest.engine.text.tokenizer import SpecialTokens, Tokenizer

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Words of the newer families, which differ in how many digits make one word.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
MODERN_WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Qwen3.5's: marks belong to letters.
MARKED_WORDS = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Those of OpenAI's o200k: a word begins with its capitals, and contractions belong to it.
_CAPITAL, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SINGLE_DIGITS = r"\p{N}"
UP_TO_THREE_DIGITS = r"\p{N}{1,3}"


def _capital_words(digits: str, contractions: str) -> str:
    words = (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}*{_SMALL}+{contractions}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CAPITAL}+{_SMALL}*{contractions}",
        digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    return "|".join(words)


O200K_WORDS = _capital_words(UP_TO_THREE_DIGITS, f"{CONTRACTIONS}?")
TEKKEN_WORDS = _capital_words(SINGLE_DIGITS, "")  # Mistral's

# Name → patterns. Each pattern in turn cuts out of the pieces so far what it matches.
GPT2_SPLITS = (GPT2_WORDS,)
DIGITS_THEN_GPT2 = (SINGLE_DIGITS, GPT2_WORDS)
LLAMA3_SPLITS = (MODERN_WORDS % UP_TO_THREE_DIGITS,)
QWEN2_SPLITS = (MODERN_WORDS % SINGLE_DIGITS,)
CJK_OR_HANGUL = r"[一-龥ࠀ-一가-퟿]+"
SPLITS: dict[str, tuple[str, ...]] = {
    # Files older than the field. Their words are nobody's in particular, but this is how they have always been read.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), GPT2_SPLITS),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS_THEN_GPT2
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe"), LLAMA3_SPLITS),
    **dict.fromkeys(("chatglm-bpe", "glm4"), LLAMA3_SPLITS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), QWEN2_SPLITS),
    "qwen35": (MARKED_WORDS,),
    **dict.fromkeys(("gpt-4o", "llama4"), (O200K_WORDS,)),
    "tekken": (TEKKEN_WORDS,),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK_OR_HANGUL, SINGLE_DIGITS),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]"),
}
# Families that take a word as one token when the vocabulary has it, whatever the merges say; they also begin with BOS.
WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "tekken"})


def tokenizer_from_gguf(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """`metadata` is a GGUF file's; `name` goes into error messages."""
    fields = _Fields(metadata, name)
    model = fields.text("model", default=None)
    if model == "gpt2":
        backend, adds_bos = _byte_level_backend(fields)
    elif model == "llama":
        merges = _merges_from_scores(fields.tokens, fields.types, fields.array("scores"), fields.vocabulary)
        backend, adds_bos = _sentencepiece_backend(fields, merges), True
    elif model == "gemma4":  # its files list the merges
        backend, adds_bos = _sentencepiece_backend(fields, fields.merges()), True
    else:
        raise ModelError(f"{name}: tokenizer.ggml.model is {model!r}; supported are 'gpt2', 'llama' and 'gemma4'")
    _add_marked_tokens(backend, fields)
    roles = SpecialTokens(
        bos=fields.token_id("bos_token_id"),
        eos=fields.token_id("eos_token_id"),
        pad=fields.token_id("padding_token_id"),
        add_bos=fields.flag("add_bos_token", default=adds_bos),
        add_eos=fields.flag("add_eos_token", default=False),
    )
    return Tokenizer(backend, roles, name)


class _Fields:
    """Typed access to the tokenizer.ggml.* fields; what is missing or of the wrong kind is a ModelError."""

    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self.name = name
        self._metadata = metadata
        self.tokens: list[str] = self.array("tokens")
        types = self._metadata.get("tokenizer.ggml.token_type")
        self.types: list[int] = [NORMAL] * len(self.tokens) if types is None else [int(t) for t in types]
        if len(self.types) != len(self.tokens):
            raise ModelError(f"{name}: {len(self.tokens)} tokens, but {len(self.types)} token types")
        self.vocabulary = {token: index for index, token in enumerate(self.tokens)}
        if len(self.vocabulary) != len(self.tokens):
            raise ModelError(f"{name}: tokenizer.ggml.tokens holds the same token twice")

    def array(self, field: str) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{field}")
        if value is None or isinstance(value, (str, int, float)):
            raise ModelError(f"{self.name}: the metadata has no array tokenizer.ggml.{field}")
        return value

    def merges(self) -> list[tuple[str, str]]:
        pairs = [merge.partition(" ") for merge in self.array("merges")]
        if wrong := next((pair for pair in pairs if not pair[1]), None):
            raise ModelError(f"{self.name}: {wrong[0]!r} in tokenizer.ggml.merges is not a pair")
        return [(left, right) for left, _, right in pairs]

    def text(self, field: str, default: str | None) -> str | None:
        value = self._metadata.get(f"tokenizer.ggml.{field}", default)
        return None if value is None else str(value)

    def flag(self, field: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{field}", default))

    def token_id(self, field: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{field}")
        # Some converters write -1 for "none", which reads as a huge number.
        return None if value is None or not 0 <= int(value) < len(self.tokens) else int(value)


def _byte_level_backend(fields: _Fields) -> tuple[Backend, bool]:
    pre = fields.text("pre", default="default")
    if pre not in SPLITS:
        supported = ", ".join(sorted(SPLITS))
        raise ModelError(f"{fields.name}: tokenizer.ggml.pre is {pre!r}; supported are {supported}")
    whole_words_first = pre in WHOLE_WORDS_FIRST
    backend = Backend(_bpe(fields, fields.merges(), ignore_merges=whole_words_first))
    if pre in ("qwen2", "qwen35"):
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, whole_words_first


def _sentencepiece_backend(fields: _Fields, merges: list[tuple[str, str]]) -> Backend:
    unknown = fields.token_id("unknown_token_id")
    unk_token = None if unknown is None else fields.tokens[unknown]
    backend = Backend(_bpe(fields, merges, byte_fallback=True, fuse_unk=True, unk_token=unk_token))
    spaces = normalizers.Replace(" ", SPACE_MARK)
    back_to_text = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("add_space_prefix", default=True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), spaces])
        backend.decoder = decoders.Sequence([*back_to_text, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = spaces
        backend.decoder = decoders.Sequence(back_to_text)
    return backend


def _merges_from_scores(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece always joins the neighbours that make the token with the best score: as merges, best first."""
    if len(scores) != len(tokens):
        raise ModelError(f"{len(tokens)} tokens, but {len(scores)} scores")
    order = sorted((i for i in range(len(tokens)) if types[i] == NORMAL), key=lambda i: -scores[i])
    merges: list[tuple[str, str]] = []
    for index in order:
        token = tokens[index]
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def _bpe(fields: _Fields, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(fields.vocabulary, merges, **options)
    except Exception as error:  # the library raises Exception itself
        raise ModelError(f"{fields.name}: the tokens and merges do not fit together: {error}") from error


def _add_marked_tokens(backend: Backend, fields: _Fields) -> None:
    """Tokens that are found in the text before it is cut into words: control tokens and those the user defined."""
    marked = zip(fields.tokens, fields.types, strict=True)
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in marked
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])
