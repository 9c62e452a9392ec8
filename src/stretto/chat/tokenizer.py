"""Text <-> token ids, from tokenizer.json; and a small tokenizer that needs no download.

`load_tokenizer` reads the files of a directory, or of a model in the local hub cache, in milliseconds: it imports
neither torch nor transformers. Chat messages are rendered in render.py.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from stretto.base.errors import ConfigError, DataError, reason_of
from stretto.chat.placeholders import VISION_TOKENS
from stretto.chat.templates import TemplateFiles, read_templates
from stretto.data.hub_model import find_local
from stretto.data.messages import ROLES

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
UNKNOWN = "<|unk|>"
CHAT_TOKENS = (
    END_OF_TEXT, TURN_START, TURN_END, "<think>", "</think>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
_SHORT_TEXT, _LONG_TEXT = 32, 4096  # characters
_KEPT = re.compile("([\ud800-\ud9ff][\udc00-\udfff])")
"""Two halves of characters, which no text has: in texts that are encoded, a special token that stays text."""
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n\t"


class _Pieces(NamedTuple):
    """Token ids and character offsets of a text that was encoded in pieces."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class Tokenizer:
    """The tokenizer of one directory, with its end tokens and special tokens."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        eos_ids: tuple[int, ...],
        unk_id: int | None,
        templates: TemplateFiles | None = None,
        template_tokens: Mapping[str, str] | None = None,
    ):
        """template_tokens: texts of special tokens by the names that templates use, such as `bos_token`."""
        self._backend = backend
        self.name_or_path = name
        self.templates = templates or TemplateFiles()
        self.template_tokens = dict(template_tokens or {})
        self.eos_ids = eos_ids
        self.unk_token_id = unk_id
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._keeps_text = False  # until `as_text` has been asked for
        # The renderers library encodes the same fixed texts for every prompt and every reply.
        self._encode_short = lru_cache(maxsize=256)(lambda *text: tuple(self._encode(*text).ids))
        self._offsets_short = lru_cache(maxsize=64)(self._with_offsets)
        self._decode_one = lru_cache(maxsize=1024)(lambda token, skips: self._decode([token], skips))

    @property
    def eos_token_id(self) -> int | None:
        return self.eos_ids[0] if self.eos_ids else None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of the text; the text of a special token becomes its id."""
        if len(text) <= _SHORT_TEXT:
            return list(self._encode_short(text, add_special_tokens))
        return self._encode(text, add_special_tokens).ids

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding | _Pieces:
        if self._keeps_text and _KEPT.search(text):
            return self._encode_with_text(text, add_special_tokens)
        if len(text) < _LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        # Only encode_batch releases the interpreter lock, so that other threads can run.
        return self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _encode_with_text(self, text: str, add_special_tokens: bool) -> _Pieces:
        """A text of `as_text`: its special tokens are encoded as the characters that they consist of."""
        specials = list(self.special_tokens)
        found = _Pieces([], [])
        start = 0
        for number, piece in enumerate(_KEPT.split(text)):
            is_special = number % 2 == 1
            encode = self._text_only.encode if is_special else self._backend.encode
            is_first = add_special_tokens and start == 0
            given = specials[(ord(piece[0]) - 0xD800) * 0x400 + ord(piece[1]) - 0xDC00] if is_special else piece
            encoding = encode(given, add_special_tokens=is_first)
            found.ids.extend(encoding.ids)
            # Offsets are those of the text that was given, in which a special token is two characters.
            found.offsets.extend(
                (start, start + 2) if is_special else (start + left, start + right) for left, right in encoding.offsets
            )
            start += len(piece)
        return found

    def as_text(self, text: str, tokens: Sequence[str]) -> str:
        """The text with two halves of characters for each of these special tokens in it, which `encode` keeps text."""
        self._keeps_text = True
        for index, token in enumerate(self.special_tokens):
            if token in tokens:
                text = text.replace(token, chr(0xD800 + index // 0x400) + chr(0xDC00 + index % 0x400))
        return text

    def has_special_text(self, text: str) -> bool:
        """Whether a text may have a special token's text: a quick look, before the tokens are looked for one by one."""
        return any(start in text for start in self._special_starts)

    @cached_property
    def _special_starts(self) -> frozenset[str]:
        """The first two characters of all special tokens: a few, even where the tokens are hundreds."""
        return frozenset(token[:2] for token in self.special_tokens)

    @cached_property
    def _text_only(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def special_tokens(self) -> dict[str, bool]:
        """Special tokens by their text, longest first, and whether one leaves the blanks beside it alone."""
        added = self._backend.get_added_tokens_decoder().values()
        plain = {t.content: not (t.lstrip or t.rstrip) for t in added if t.special and t.content}
        return dict(sorted(plain.items(), key=lambda item: -len(item[0])))

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts of all tokens that were added to the vocabulary."""
        return tuple(token.content for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def turn_end(self) -> str:
        """The text of the token that ends a message in ChatML: <|im_end|>, or else the first end token; "" if none."""
        if TURN_END in self.added_tokens:
            return TURN_END
        return next((text for text in map(self.token_text, self.eos_ids) if text), "")

    @cached_property
    def leading_text(self) -> str:
        """The text of the token that this tokenizer writes before a text, such as `<s>`; "" if it writes none."""
        first = self.encode("", add_special_tokens=True)
        return self.token_text(first[0]) if first else ""

    @property
    def added_ids(self) -> tuple[int, ...]:
        """The ids of all tokens that were added to the vocabulary."""
        return tuple(self._backend.get_added_tokens_decoder())

    def token_text(self, token_id: int) -> str:
        """The text of one special token."""
        return self._backend.id_to_token(int(token_id)) or ""

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: a text of more than n times as many has more than n tokens."""
        return max(len(token.encode()) for token in self._backend.get_vocab(with_added_tokens=True))

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids, with the text of special tokens unless they are skipped."""
        ids = [int(i) for i in token_ids]
        return (
            self._decode_one(ids[0], skip_special_tokens) if len(ids) == 1 else self._decode(ids, skip_special_tokens)
        )

    def _decode(self, ids: list[int], skips_special_tokens: bool) -> str:
        return self._backend.decode(ids, skip_special_tokens=skips_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of exactly this token; None if the vocabulary lacks it."""
        return self._backend.token_to_id(token)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Ids of tokens, or the unknown token's id; the renderers library calls this."""
        if isinstance(tokens, str):
            token_id = self.token_id(tokens)
            return self.unk_token_id if token_id is None else token_id
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def __call__(
        self, text: str, *, add_special_tokens: bool = False, return_offsets_mapping: bool = False
    ) -> dict[str, list[Any]]:
        """Token ids and character offsets, by which the renderers library finds the text of messages."""
        # The library tries a letter before every message, to see whether there are offsets.
        found = (self._offsets_short if len(text) <= 1 else self._with_offsets)(text, add_special_tokens)
        return {"input_ids": list(found[0]), "offset_mapping": list(found[1])}

    def _with_offsets(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[Any]]:
        encoding = self._encode(text, add_special_tokens)
        return encoding.ids, encoding.offsets


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load the tokenizer of a directory, or of a model in the local hub cache.

    Raises: ConfigError if there is no such directory or model; DataError if it has no valid tokenizer files.
    """
    path = find_directory(str(name))
    file = path / "tokenizer.json"
    if not file.is_file():
        raise DataError(_no_tokenizer(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as cause:  # the library raises bare Exception for malformed files
        raise DataError(f"{file}: not a tokenizer: {cause}") from cause
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(path / "tokenizer_config.json")
    eos_ids = end_ids(path)
    if eos := _given_token(path, config, "eos_token"):
        if (eos_id := backend.token_to_id(eos)) is None:
            raise DataError(f"{path}/tokenizer_config.json: eos_token {eos!r} is not in tokenizer.json.")
        eos_ids = tuple(dict.fromkeys((eos_id, *eos_ids)))
    unknown = _given_token(path, config, "unk_token")
    unk_id = backend.token_to_id(unknown) if unknown else None
    return Tokenizer(
        backend,
        name=str(name),
        eos_ids=eos_ids,
        unk_id=unk_id,
        templates=read_templates(path, config),
        template_tokens=_template_tokens(path, config),
    )


_CONVERTED = {
    "tokenizer.model": "a file of SentencePiece or tiktoken",
    "tekken.json": "Mistral's own",
    "vocab.json": "the files of a slow tokenizer",
}
"""Files of a tokenizer that transformers writes as tokenizer.json."""


def _no_tokenizer(path: Path) -> str:
    """What is there in place of tokenizer.json, and the command that writes it."""
    others = [name for name in (*_CONVERTED, *(file.name for file in path.glob("*.tiktoken")))]
    found = next((name for name in others if (path / name).is_file()), None)
    if found is None:
        return (
            f"{path}: no tokenizer.json; export the tokenizer with `save_pretrained` of a fast tokenizer, or name a "
            "directory that has one as tokenizer.name."
        )
    load = f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
    return (
        f"{path}: no tokenizer.json, but {found} ({_CONVERTED.get(found, 'a file of tiktoken')}); write tokenizer.json "
        f'beside it once: python -c "from transformers import AutoTokenizer; {load}" (it may need the package '
        "sentencepiece or tiktoken)"
    )


def build_letters_tokenizer(
    directory: str | Path, characters: str = CHARACTERS, phrases: Sequence[str] = (), *, has_images: bool = False
) -> Path:
    """Write the examples' tokenizer of 112 tokens: one per character, and Qwen3's chat tokens.

    A role name is a single token only directly after <|im_start|>, so the text `user` in a message is four tokens. A
    blank line is one token, as in Qwen3. Characters not in `characters` (by default printable ASCII) become <|unk|>.
    `phrases` are texts that are one token each wherever they occur, for example a tool's description; their ids
    follow those above, and has_images adds the tokens for images after them. transformers' AutoTokenizer loads the
    files, and its chat template gives the same ids as render.py.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

    words = [*CHAT_TOKENS, UNKNOWN, *ROLES, "\n\n", *characters]
    if known := [phrase for phrase in phrases if not phrase or phrase in words]:
        raise ConfigError(f"[model.scratch] phrases: {known[0]!r} is a token already, or empty; remove it.")
    special = (*CHAT_TOKENS[:3], UNKNOWN, *(VISION_TOKENS if has_images else ()))
    words += [*dict.fromkeys(phrases), *special[4:]]
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    # The text between two special tokens is one segment, so \A matches directly after a special token.
    pieces = Regex(rf"\A(?:{'|'.join(ROLES)})(?=\n|\z)|\n\n|[\s\S]")
    backend.pre_tokenizer = pre_tokenizers.Split(pieces, behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in (*CHAT_TOKENS[3:], *dict.fromkeys(phrases))]
    )

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": (Path(__file__).parent / "letters.jinja").read_text(encoding="utf-8"),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


LETTERS_TEMPLATE = "the letters tokenizer's template"
"""A text of letters.jinja."""


def is_letters_tokenizer(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer is one of `build_letters_tokenizer`, with Qwen3's chat tokens and no other template."""
    first = (*CHAT_TOKENS, UNKNOWN)
    is_own = all(LETTERS_TEMPLATE in source for source in tokenizer.templates.sources.values())
    return is_own and [tokenizer.token_id(token) for token in first] == list(range(len(first)))


def find_directory(name: str) -> Path:
    """The directory `name`, or that of the model of this name in the local hub cache.

    Raises: ConfigError if there is none.
    """
    if (found := find_local(name, has_weights=False)) is None:
        raise ConfigError(
            f"no directory {name!r}, and no model of that name in the local hub cache; "
            "give the directory of a model as model.name (or tokenizer.name), "
            f"or download it first with `hf download {name}`."
        )
    return found


def end_ids(directory: Path) -> tuple[int, ...]:
    """A model's end tokens from generation_config.json, then config.json; loads no tokenizer.

    Raises: DataError for a value that is no id.
    """
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = _read_json(directory / file).get("eos_token_id")
        some = value if isinstance(value, list) else [] if value is None else [value]
        if wrong := [each for each in some if type(each) is not int]:
            raise DataError(
                f"{directory / file}: eos_token_id = {wrong[0]!r:.60} must be the id of a token, or a list of ids"
            )
        ids += some
    return tuple(dict.fromkeys(ids))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as cause:
        raise DataError(f"{file}: cannot be read: {reason_of(cause)}") from cause
    if not isinstance(found, dict):
        raise DataError(f"{file}: a {type(found).__name__} where a JSON object belongs.")
    return found


_SURROGATE = re.compile("[\ud800-\udfff]")


def _given_token(path: Path, config: Mapping[str, Any], key: str) -> str | None:
    """The text of a token; None if there is none. Raises: DataError for what is no text."""
    token = _token_text(config.get(key))
    if token is not None and (not isinstance(token, str) or _SURROGATE.search(token)):
        raise DataError(f"{path}/tokenizer_config.json: {key} = {token!r:.60} must be the text of a token")
    return token


def _template_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names under which transformers gives them to templates."""
    entries = {**_read_json(path / "special_tokens_map.json"), **config}
    named = {key: _token_text(entries.get(key)) for key in _TOKEN_NAMES}
    return {key: text for key, text in named.items() if isinstance(text, str)}


def _token_text(entry: Any) -> str | None:
    """The text of a token in tokenizer_config.json: a string, or an object with the key `content`."""
    return entry.get("content") if isinstance(entry, dict) else entry
