"""The tokenizer of the shapes models: CLIP's byte-pair encoding with the grammar's words as single tokens.

And what a text tower should know at each noun, for probes that teach it: without them towers this small take many
thousand steps to bind a relation, or a count, to its noun.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from imgscale.assets.shapes.world import COLOURS, COUNTS, RELATIONS, SHAPES, Scene

LENGTH = 16  # tokens: the longest caption of the grammar has 12 words, plus start and end
ANSWERS = (len(COUNTS), len(SHAPES), len(COLOURS) + 1, 2 * len(RELATIONS) + 1)  # of a probe at a noun, see `parsed`
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


def nouns_of(vocabulary: dict[str, int]) -> set[int]:
    """The tokens of the shapes' names."""
    return {vocabulary[shape + end + "</w>"] for shape in SHAPES for end in ("", "s")}


def parsed(scenes: list[Scene], ids: Tensor, nouns: set[int]) -> tuple[Tensor, Tensor]:
    """Where the nouns of captions with tokens ``ids`` are, ``(groups, 2)``, and what is asked there, ``(groups, 4)``.

    Asked: count, shape, colour (0 for any) and side of the relation (0 for none), as indices.
    """
    places: list[tuple[int, int]] = []
    asked: list[tuple[int, int, int, int]] = []
    for i, scene in enumerate(scenes):
        spots = [j for j, token in enumerate(ids[i].tolist()) if token in nouns]
        for k, (group, spot) in enumerate(zip(scene.groups, spots, strict=True)):
            colour = 1 + list(COLOURS).index(group.colour) if group.colour else 0
            side = 1 + 2 * list(RELATIONS).index(scene.relation) + (k > 0) if scene.relation else 0
            places.append((i, spot))
            asked.append((group.count - 1, SHAPES.index(group.shape), colour, side))
    return torch.tensor(places), torch.tensor(asked)


def parsing_loss(said: Tensor, asked: Tensor) -> Tensor:
    """Cross-entropy of a probe's answers ``(groups, sum(ANSWERS))``, averaged over the four questions."""
    return torch.stack([*map(nn.functional.cross_entropy, said.split(ANSWERS, -1), asked.T)]).mean()
