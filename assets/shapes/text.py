"""The tokenizer of the shapes models: CLIP's byte-pair encoding with the grammar's words as single tokens."""

from __future__ import annotations

import json
from pathlib import Path

from imgscale.assets.shapes.world import COLOURS, COUNTS, RELATIONS, SHAPES

LENGTH = 16  # tokens: the longest caption of the grammar has 12 words, plus start and end
START, END = "<|startoftext|>", "<|endoftext|>"


def words() -> list[str]:
    """Every word of the grammar, and a few that people add."""
    nouns = [s + end for s in SHAPES for end in ("", "s")]
    relations = [w for r in RELATIONS for w in r.split()]
    return list(
        dict.fromkeys(["an", "one", *COUNTS.values(), *COLOURS, *nouns, *relations, "and", ",", "to", "the", "on"])
    )


def write_tokenizer(folder: Path) -> None:
    """Writes `vocab.json`, `merges.txt` and the settings of a CLIP tokenizer into ``folder``."""
    letters = sorted({c for w in words() for c in w} | set("abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"))
    merges: list[tuple[str, str]] = []
    for word in sorted(words(), key=len, reverse=True):
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            if (pieces[0], pieces[1]) not in merges:
                merges.append((pieces[0], pieces[1]))
            pieces[:2] = [pieces[0] + pieces[1]]
    tokens = [*letters, *(c + "</w>" for c in letters), *dict.fromkeys(a + b for a, b in merges)]
    vocabulary = {t: i for i, t in enumerate([*dict.fromkeys(tokens), START, END])}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    settings = {"tokenizer_class": "CLIPTokenizer", "model_max_length": LENGTH, "do_lower_case": True}
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | special, indent=1) + "\n")
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=1) + "\n")
