"""The file formats of a vocabulary: the ranks of a ``.tiktoken`` file, and Hugging Face's ``tokenizer.json``."""

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

# As tiktoken publishes them (tiktoken_ext/openai_public.py), by the name that gigatoken has for each.
PATTERNS = {
    "gpt2": r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    "cl100k": r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s""",
    "o200k": r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"""
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"""
    r"""|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
}
END = "<|endoftext|>"
_ENDS = (END, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>")
"""What the token that ends a text is called, in the order in which a ``tokenizer.json`` is searched for it."""


def tokens_of_ranks(ranks: bytes) -> list[bytes]:
    """The tokens of a rank file by id, the last the end of text. Raises ``ValueError`` for holes."""
    found: dict[int, bytes] = {}
    for line in ranks.splitlines():
        token, rank = line.split()
        found[int(rank)] = base64.b64decode(token, validate=True)
    return [*_complete(found), END.encode()]


def tokens_of_json(values: dict[str, Any]) -> list[bytes]:
    """The tokens of a ``tokenizer.json`` by id. Raises ``ValueError`` for holes, and where none ends a text."""
    model, splits = values["model"], values["pre_tokenizer"] or {}
    *before, last = splits.get("pretokenizers", [splits])
    if model["type"] != "BPE" or last.get("type") != "ByteLevel":
        raise ValueError(f"its model is {model['type']} with the pre-tokenizer {last.get('type')}")
    if last["add_prefix_space"] or values["normalizer"] or model.get("unk_token") or model.get("dropout"):
        raise ValueError("it changes the text: add_prefix_space, normalizer, unk_token and dropout must be off")
    if [split["type"] for split in before] != ["Split"] * (not last["use_regex"]):
        raise ValueError("its pre-tokenizer is not one split pattern and ByteLevel")
    bytes_of = {letter: byte for byte, letter in letters().items()}
    special = {token["id"]: token["content"].encode() for token in values["added_tokens"]}
    found = {
        number: bytes(bytes_of[letter] for letter in token)
        for token, number in model["vocab"].items()
        if number not in special
    }
    end_of_json(values)
    return _complete(found, special)


def end_of_json(values: dict[str, Any]) -> int:
    """The id of the end of text in a ``tokenizer.json``. Raises ``ValueError`` where it has none."""
    known = {token["content"]: token["id"] for token in values["added_tokens"]}
    for name in _ENDS:
        if name in known:
            return known[name]
    raise ValueError(f"none of its added tokens is one of {' '.join(_ENDS)}, which ends a text")


def _complete(found: dict[int, bytes], special: dict[int, bytes] | None = None) -> list[bytes]:
    """The tokens by id. Raises ``ValueError`` when an id or a single byte is missing."""
    if missing := sorted({bytes([value]) for value in range(256)} - set(found.values())):
        raise ValueError(f"{len(missing)} of the 256 single bytes have no token, the first is {missing[0]!r}")
    everything = found | (special or {})
    if holes := set(range(len(everything))) - everything.keys():
        raise ValueError(f"the id {min(holes)} has no token")
    if len(set(found.values())) < len(found):
        raise ValueError("two ids have the same token")
    return [everything[number] for number in range(len(everything))]


def without_special_tokens(values: dict[str, Any]) -> str:
    """A ``tokenizer.json`` that encodes special tokens as ordinary text, and adds none."""
    off = dict.fromkeys(("post_processor", "truncation", "padding"))
    return json.dumps(values | off | {"added_tokens": []}, ensure_ascii=False)


def letters() -> dict[int, str]:
    """GPT-2's printable character for each byte: the byte's own if it is printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def json_of_ranks(tokens: Sequence[bytes], merges: Sequence[tuple[bytes, bytes]], pattern: str) -> str:
    """A ``tokenizer.json``, which Hugging Face's libraries read, of ``tokens`` by id, the last the end of text."""
    known = letters()

    def written(token: bytes) -> str:
        return "".join(known[byte] for byte in token)

    ids = {written(token): rank for rank, token in enumerate(tokens[:-1])}
    # Oniguruma reads a possessive {1,3}+ as a repeated group and $ as the end of a line; nothing here depends on
    # whether a repeat gives back.
    regex = re.sub(r"([+*?]|\{1,3\})\+", r"\1", PATTERNS[pattern]).replace("$", r"\z")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    after_split = {"type": "Sequence", "pretokenizers": [split, byte_level | {"use_regex": False}]}
    end = {"id": len(ids), "content": END, "special": True, "normalized": False}
    values = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [end | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)],
        "pre_tokenizer": byte_level if pattern == "gpt2" else after_split,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": ids | {END: len(ids)},
            "merges": [[written(part) for part in pair] for pair in merges],
        },
    }  # fmt: skip
    return json.dumps(values, ensure_ascii=False)
