"""What a bandit sees of a prompt: how much it asks for, read off its words, and a few directions of an embedding."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from imgscale.errors import UserError

Floats = npt.NDArray[np.float64]

COUNTS = ("numbers", "things", "spatial words", "colours", "content words", "quoted words", "words")

_NUMBERS = {
    **{word: i for i, word in enumerate("no one two three four five six seven eight nine ten eleven twelve".split())},
    **{"zero": 0, "pair": 2, "couple": 2, "dozen": 12, "several": 4, "many": 8},
}
_SPATIAL = frozenset(
    """above below under beneath over left right top bottom behind front beside between inside outside near next
    around across opposite on onto underneath alongside within upper lower middle centre center corner""".split()
)
_COLOURS = frozenset(
    """red green blue yellow orange purple violet pink brown black white grey gray cyan magenta turquoise teal gold
    golden silver beige maroon navy crimson scarlet olive indigo lavender""".split()
)
_SMALL = frozenset(
    """a an the of and or to in at by for from with without into as is are be been being it its their his her that
    this these those there which who whose photo picture image drawing painting side not nor but than then""".split()
)


@dataclass(frozen=True)
class Prompts:
    """Turns prompts into the features z: `COUNTS` and, if wanted, a fixed random projection of an embedding.

    Args:
        embedding: The length of the embeddings that will be given; 0 for none.
        projected: How many directions of them to keep, 16 to 32 say; at most ``embedding``.
        seed: Of the directions. They are random and orthonormal, so that distances between embeddings are kept on
            average, and never trained, so that what is learned on them stays valid.

    Raises:
        UserError: More directions than the embedding has.
    """

    embedding: int = 0
    projected: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.projected <= self.embedding or (self.embedding and not self.projected):
            raise UserError(
                f"An embedding of {self.embedding} numbers can't be projected onto {self.projected} directions;"
                " give 1 of them or more, and no more than it has numbers."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the features; those of a projection say which it is."""
        which = f"of {self.projected} directions in {self.embedding} (seed {self.seed})"
        return (*COUNTS, *(f"embedding {i} {which}" for i in range(self.projected)))

    def __call__(self, prompt: str, embedding: npt.ArrayLike | None = None) -> Floats:
        """z, of shape (len(names),), each about 0 to 1 in size.

        Args:
            prompt: What was asked for.
            embedding: Of the prompt, (embedding,); its length doesn't matter, only its direction.

        Raises:
            UserError: There should be an embedding and isn't, or the other way round, or it isn't finite.
        """
        z = np.array(counts(prompt))
        given = np.zeros(0) if embedding is None else np.asarray(embedding, np.float64)
        if given.shape != (self.embedding,):
            raise UserError(f"The embedding has the shape {given.shape}; it must be ({self.embedding},).")
        if not np.isfinite(given).all():
            raise UserError(f"The embedding of {prompt[:80]!r} isn't finite; its text encoder is broken.")
        if not self.projected:
            return z
        direction = given / max(float(np.linalg.norm(given)), 1e-12)
        # Of a random direction, the projection has length 1 on average.
        kept = math.sqrt(self.embedding / self.projected) * (_directions(self) @ direction)
        return np.concatenate([z, kept])


def counts(prompt: str) -> list[float]:
    """`COUNTS` of a prompt, scaled to about 0 to 1: how many numbers it names, what they add up to, and so on.

    >>> [round(x, 2) for x in counts('two red cats left of a sign that says "open"')]
    [0.25, 0.37, 0.25, 0.25, 0.69, 0.25, 0.7]
    """
    quoted = re.findall(r"[\"“”]([^\"“”]+)[\"“”]", prompt)
    words = re.findall(r"\d+|[^\W\d_]+", prompt.lower())
    numbers = [min(int(word), 100) if word.isdecimal() else _NUMBERS[word] for word in words if _number(word)]
    spatial = sum(word in _SPATIAL for word in words)
    colours = sum(word in _COLOURS for word in words)
    known = _NUMBERS.keys() | _SPATIAL | _COLOURS | _SMALL
    content = sum(len(word) > 2 and not _number(word) and word not in known for word in words)
    return [
        len(numbers) / 4,
        math.log1p(sum(numbers)) / 3,
        spatial / 4,
        colours / 4,
        math.log1p(content) / 3,
        sum(len(text.split()) for text in quoted) / 4,
        math.log1p(len(words)) / 3.5,
    ]


def _number(word: str) -> bool:
    return word.isdecimal() or word in _NUMBERS


@lru_cache(maxsize=8)
def _directions(prompts: Prompts) -> Floats:
    """(projected, embedding), orthonormal rows."""
    drawn = np.random.default_rng(prompts.seed).standard_normal((prompts.embedding, prompts.projected))
    q, r = np.linalg.qr(drawn)
    return np.ascontiguousarray((q * np.sign(np.diag(r))).T)  # without the signs, a matter of the LAPACK at hand
