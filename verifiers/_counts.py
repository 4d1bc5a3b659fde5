"""What a prompt asks to be counted: "three red apples and two cats" asks for 3 apples and 2 cats.

A phrase begins with a number, "a", "an" or "no". Its nouns are the words up to one that can't be part of it, without
colours, sizes and the like, which detectors don't tell apart reliably: numbers of one noun are added up. Where a prompt
is read wrongly, the option ``counts`` says what is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from imgscale.errors import UserError

_ONES = (
    *("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()),
    *("seventeen eighteen nineteen twenty".split()),
)
_TENS = "thirty forty fifty sixty seventy eighty ninety hundred".split()
NUMBERS = {
    **{word: value for value, word in enumerate(_ONES)},
    **{word: value for value, word in zip(range(30, 101, 10), _TENS, strict=True)},
    **{"a": 1, "an": 1, "no": 0, "without": 0, "single": 1, "both": 2, "couple": 2, "pair": 2, "trio": 3, "dozen": 12},
}
LARGEST = 999  # a larger number is a year or a size

# What can't be part of a phrase: whatever follows belongs to something else.
_ENDS = frozenset(
    """and or but nor with without within in on at of to from by for under underneath above below beside besides near
    behind over left right next between inside outside around beneath against along across through into onto off upon
    as like while that which who whose where when than then there is are was were be been being has have had do does
    its it his her their the this these those each every some any many several few all more most other another
    against beyond during facing atop amid among up down out away together both also not one's i you we they""".split()
)
# What tells nothing of the kind, unless it is the last word, as in "two oranges".
_ADJECTIVES = frozenset(
    """red orange yellow green blue purple violet pink brown black white gray grey golden silver beige turquoise teal
    cyan magenta maroon navy tan colored coloured colorful colourful bright dark light pale vivid plain
    big large huge giant gigantic enormous massive small little tiny miniature medium tall short long wide narrow thin
    thick fat slim old new young ancient modern vintage antique beautiful pretty cute lovely adorable ugly happy sad
    angry round square rectangular triangular oval shiny glossy fluffy furry fuzzy soft hard wooden metallic metal
    plastic glassy transparent clear clean dirty empty full open closed broken ripe fresh different identical similar
    same exactly only just about wild lone extra single very realistic photorealistic cartoon tasty delicious""".split()
)
_NOUNS_TOO = frozenset(("light", "orange", "square"))  # "a traffic light"
# What holds others ("a photo of three cats") or no countable thing ("on a sunny day").
_FRAMES = frozenset(
    """photo photograph picture image painting drawing illustration sketch render rendering portrait shot closeup
    close-up view scene snapshot poster watercolor watercolour digital art artwork style group bunch set row line pile
    stack collection pair couple number lot variety series array background foreground day night morning evening
    afternoon way distance side front top bottom middle center centre corner total sunny cloudy rainy""".split()
)
_DOING = frozenset(
    "ring king wing string spring swing building ceiling painting earring sibling duckling pudding".split()
)
_DONE = frozenset("bed shed sled seed weed reed bobsled steed breed bread".split())
_LIKE_LY = frozenset("fly butterfly dragonfly firefly family jelly lily belly doily bully".split())
_ALWAYS_PLURAL = frozenset(
    "scissors skis pants jeans shorts trousers sunglasses binoculars tongs pliers headphones pajamas".split()
)
_SINGULAR_S = frozenset(
    """bus gas lens tennis sports news cactus octopus walrus hippopotamus platypus virus canvas christmas atlas
    iris oasis chassis campus circus""".split()
)
_IRREGULAR = {
    **{"people": "person", "men": "man", "women": "woman", "children": "child", "mice": "mouse", "geese": "goose"},
    **{"feet": "foot", "teeth": "tooth", "oxen": "ox", "cacti": "cactus", "fungi": "fungus", "octopi": "octopus"},
    **{"buses": "bus", "busses": "bus", "lenses": "lens", "axes": "axe", "gases": "gas", "dice": "die"},
    **{"octopuses": "octopus", "cactuses": "cactus", "walruses": "walrus", "viruses": "virus", "irises": "iris"},
    **{"canvases": "canvas", "atlases": "atlas", "campuses": "campus", "circuses": "circus"},
    **{"knives": "knife", "wives": "wife", "lives": "life", "leaves": "leaf", "wolves": "wolf", "shelves": "shelf"},
    **{"loaves": "loaf", "calves": "calf", "halves": "half", "scarves": "scarf", "hooves": "hoof", "elves": "elf"},
    **{"thieves": "thief", "dwarves": "dwarf", "bookshelves": "bookshelf", "snowmen": "snowman"},
    **{"firemen": "fireman", "policemen": "policeman", "quizzes": "quiz", "headaches": "headache"},
    **{"avalanches": "avalanche", "moustaches": "moustache", "mustaches": "mustache"},
}
_IE = frozenset(
    """cookies movies zombies selfies brownies ties neckties pies magpies smoothies hoodies pixies calories veggies
    birdies genies collies boogies""".split()
)
_OE = frozenset("shoes horseshoes snowshoes toes canoes hoes oboes foes does".split())
_SAME = frozenset("sheep fish deer moose bison salmon trout shrimp aircraft spacecraft swine squid".split())


def parse(prompt: str) -> dict[str, int]:
    """How many of what a prompt asks for, in its order; empty where it has nothing to count.

    >>> parse("a photo of three red apples and two cats, without a dog")
    {'apple': 3, 'cat': 2, 'dog': 0}
    """
    words = re.findall(r"[^\W\d_]+(?:['’-][^\W_]+)*|\d+(?![\w-])|[^\w\s]|\S+", prompt.lower())
    found: dict[str, int] = {}
    at = 0
    while at < len(words):
        number = _number(words[at])
        if number is None:
            at += 1
            continue
        at += 1
        while at < len(words) and (more := _number(words[at])) is not None:  # "a pair", "no two", "twenty one"
            number = _joined(number, more, words[at])
            at += 1
        if at < len(words) and words[at] == "of" and words[at - 1] in ("pair", "couple", "trio", "dozen"):
            at += 1
        phrase, at = _phrase(words, at, number)
        if phrase and not {*phrase.split()} <= _FRAMES:
            found[phrase] = found.get(phrase, 0) + number
    return found


def given(text: str) -> dict[str, int]:
    """The counts in an option: "apple:3, cat:2", in parentheses if it is part of a verifier's name.

    Raises:
        UserError: It has another form.
    """
    found: dict[str, int] = {}
    for part in re.sub(r"^\s*\((.*)\)\s*$", r"\1", text, flags=re.DOTALL).split(","):
        match = re.fullmatch(r"\s*([^\W\d_][\w' -]*?)\s*:\s*(\d{1,3})\s*", part)
        if not match:
            raise UserError(f"count's counts can't be {text!r}; give what and how many, such as (apple:3,cat:2).")
        found[" ".join(match[1].lower().split())] = int(match[2])
    return found


def singular(word: str) -> str:
    """One of what a plural names; a singular stays as it is."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word in _ALWAYS_PLURAL or word in _SAME or word in _SINGULAR_S or word[-2:] in ("ss", "us"):
        return word
    if word in _IE or word in _OE:
        return word[:-1]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "sses", "xes", "zzes", "oes")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and len(word) > 2 else word


def _number(word: str) -> int | None:
    if word.isdecimal():
        return int(word) if int(word) <= LARGEST else None
    tens, hyphen, ones = word.partition("-")
    if hyphen and NUMBERS.get(tens, 0) >= 20 and 0 < NUMBERS.get(ones, 0) < 10:  # twenty-one, but not three-legged
        return NUMBERS[tens] + NUMBERS[ones]
    return NUMBERS.get(word)


def _joined(number: int, more: int, word: str) -> int:
    """The number of two words: "twenty one", "two hundred", "two dozen", "a pair", "without a"."""
    if word in ("hundred", "dozen"):
        return number * more
    if number >= 20 and 0 < more < 10:
        return number + more
    return 0 if number == 0 else max(number, more)


def _phrase(words: list[str], at: int, number: int) -> tuple[str, int]:
    """The nouns that begin at a place, in the singular, and the place after them."""
    nouns: list[str] = []
    while at < len(words) and not _ends(words, at, number, nouns):
        nouns.append(words[at])
        at += 1
    kept = [noun for noun in nouns[:-1] if not _describes(noun)] + nouns[-1:]
    if not kept or kept[-1] in _ADJECTIVES and kept[-1] not in _NOUNS_TOO:
        return "", at
    last = kept[-1]
    return " ".join([*kept[:-1], last if number == 1 and last in _SINGULAR_S else singular(last)]), at


def _describes(word: str) -> bool:
    """Whether a word before a noun tells nothing of its kind: "green", "three-legged", "brightly"."""
    return word in _ADJECTIVES or "-" in word or (word.endswith("ly") and word not in _LIKE_LY)


def _is_done(word: str) -> bool:
    """Whether it is a participle: part of "a potted plant", but not of "a cat perched on a wall"."""
    return word.endswith("ed") and word not in _DONE


def _ends(words: list[str], at: int, number: int, nouns: Iterable[str]) -> bool:
    """Whether a phrase with these nouns goes no further than here."""
    word = words[at]
    if word in _ENDS or not word[0].isalpha() or _number(word) is not None:
        return True
    before = [noun for noun in nouns if not _describes(noun) and not _is_done(noun)]
    if not before:
        return False
    if word in _ADJECTIVES and word not in _NOUNS_TOO:
        return True
    if _is_done(word) or (word.endswith("ing") and word not in _DOING):  # "two cats sleeping"
        return True
    if word.endswith("ly") and word not in _LIKE_LY:
        return True
    if number == 1:  # "a dog barks"
        return _is_plural(word) and word not in _ALWAYS_PLURAL
    # "three dogs bark", but "three sports balls"
    return _is_plural(before[-1]) and not _is_plural(word)


def _is_plural(word: str) -> bool:
    return singular(word) != word or word in _ALWAYS_PLURAL
