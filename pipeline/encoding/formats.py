"""File formats of tokenizers: the ranks of a ``.tiktoken`` file, and Hugging Face's ``tokenizer.json``."""

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

# Split patterns as published by tiktoken (tiktoken_ext/openai_public.py), by gigatoken's names.
SPLIT_PATTERNS = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}
END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")
"""Names of end-of-text tokens, in the order in which a ``tokenizer.json`` is searched for one."""
_DISABLED_SETTINGS = dict.fromkeys(("post_processor", "truncation", "padding"))


def parse_ranks(ranks: bytes) -> list[bytes]:
    """Return the tokens of a rank file by id, with an end-of-text token last.

    Raises ``ValueError`` for missing ids.
    """
    tokens_by_id: dict[int, bytes] = {}
    for line in ranks.splitlines():
        token, rank = line.split()
        tokens_by_id[int(rank)] = base64.b64decode(token, validate=True)
    return [*_order_tokens(tokens_by_id), END_OF_TEXT.encode()]


def parse_tokenizer_json(values: dict[str, Any]) -> list[bytes]:
    """Return the tokens of a ``tokenizer.json`` by id.

    Raises ``ValueError`` if ids or the end-of-text token are missing, or if the tokenizer does more than split and
    merge the text, because its tokens would not be the bytes of the text.
    """
    model, splits = values["model"], values.get("pre_tokenizer") or {}
    *first_pretokenizers, last_pretokenizer = splits.get("pretokenizers", [splits])
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")  # Files written before 2022 have no type.
    if kind != "BPE" or last_pretokenizer.get("type") != "ByteLevel":
        raise ValueError(f"its model is {kind} with the pre-tokenizer {last_pretokenizer.get('type')}")
    changes = [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    changes += ["add_prefix_space"] * bool(last_pretokenizer["add_prefix_space"]) + ["normalizer"] * bool(
        values.get("normalizer")
    )
    if changes:
        raise ValueError(f"it changes the text; {' and '.join(changes)} must be off")
    if [split["type"] for split in first_pretokenizers] != ["Split"] * (not last_pretokenizer.get("use_regex", True)):
        raise ValueError("its pre-tokenizer is not one split pattern and ByteLevel")
    bytes_of = {letter: byte for byte, letter in byte_letters().items()}
    added_by_id = {token["id"]: token["content"].encode() for token in added_tokens(values)}
    tokens_by_id = {
        number: bytes(bytes_of[letter] for letter in token)
        for token, number in model["vocab"].items()
        if number not in added_by_id
    }
    find_end_of_text(values)
    return _order_tokens(tokens_by_id, added_by_id)


def added_tokens(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens of a ``tokenizer.json`` that are recognized before the text is split into words."""
    return values.get("added_tokens") or []


def find_end_of_text(values: dict[str, Any]) -> int:
    """Return the id of the end-of-text token in a ``tokenizer.json``. Raises ``ValueError`` if there is none."""
    id_by_name = {token["content"]: token["id"] for token in added_tokens(values)}
    for name in _END_OF_TEXT_NAMES:
        if name in id_by_name:
            return id_by_name[name]
    raise ValueError(f"no added token marks the end of a text (expected one of {' '.join(_END_OF_TEXT_NAMES)})")


def _order_tokens(tokens_by_id: dict[int, bytes], added_by_id: dict[int, bytes] | None = None) -> list[bytes]:
    """Return the tokens by id. Raises ``ValueError`` if an id or a single byte is missing."""
    all_tokens = tokens_by_id | (added_by_id or {})
    if missing_bytes := sorted({bytes([value]) for value in range(256)} - set(all_tokens.values())):
        raise ValueError(f"{len(missing_bytes)} of the 256 single bytes have no token (first: {missing_bytes[0]!r})")
    if missing_ids := set(range(len(all_tokens))) - all_tokens.keys():
        raise ValueError(f"the id {min(missing_ids)} has no token")
    if len(set(tokens_by_id.values())) < len(tokens_by_id):
        raise ValueError("two ids have the same token")
    return [all_tokens[number] for number in range(len(all_tokens))]


def to_ordinary_json(values: dict[str, Any]) -> str:
    """Return a ``tokenizer.json`` that encodes special and end-of-text tokens as ordinary text, and only the text."""
    end = find_end_of_text(values)
    kept_tokens = [token for token in added_tokens(values) if not token["special"] and token["id"] != end]
    return json.dumps(values | _DISABLED_SETTINGS | {"added_tokens": kept_tokens}, ensure_ascii=False)


def to_reference_json(values: dict[str, Any]) -> str:
    """Return a ``tokenizer.json`` that only encodes the text, for the reference library.

    The end-of-text token is marked as special, because the library can encode special tokens as ordinary text.
    """
    end = find_end_of_text(values)
    reference_tokens = [token | {"special": True} if token["id"] == end else token for token in added_tokens(values)]
    return json.dumps(values | _DISABLED_SETTINGS | {"added_tokens": reference_tokens}, ensure_ascii=False)


def byte_letters() -> dict[int, str]:
    """Return GPT-2's printable character for each byte: the byte's own if printable, else one from 256 on."""
    printable_bytes = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    return {byte: chr(byte) for byte in printable_bytes} | {byte: chr(256 + n) for n, byte in enumerate(other_bytes)}


def make_tokenizer_json(tokens: Sequence[bytes], merges: Sequence[tuple[bytes, bytes]], pattern: str) -> str:
    """Return a ``tokenizer.json`` for Hugging Face's libraries from ``tokens`` by id, the end-of-text token last."""
    letter_by_byte = byte_letters()

    def to_letters(token: bytes) -> str:
        return "".join(letter_by_byte[byte] for byte in token)

    ids = {to_letters(token): rank for rank, token in enumerate(tokens[:-1])}
    # Greedy quantifiers match the same text in these patterns, and Oniguruma would parse a possessive {1,3}+ as a
    # repeated group. It would also parse $ as the end of a line.
    regex = re.sub(r"([+*?]|\{1,3\})\+", r"\1", SPLIT_PATTERNS[pattern]).replace("$", r"\z")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    after_split = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    end = {"id": len(ids), "content": END_OF_TEXT, "special": True, "normalized": False}
    values = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [end | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
        "pre_tokenizer": byte_level if pattern == "gpt2" else after_split,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": ids | {END_OF_TEXT: len(ids)},
            "merges": [[to_letters(part) for part in pair] for pair in merges],
        },
    }  # fmt: skip
    return json.dumps(values, ensure_ascii=False)
