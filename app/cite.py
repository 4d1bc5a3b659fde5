"""`imgscale cite`: what to cite, as BibTeX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources

from imgscale.app.console import print_json
from imgscale.errors import UnknownName


def references() -> dict[str, str]:
    """All BibTeX entries by their keys."""
    text = (resources.files("imgscale.assets") / "references.bib").read_text(encoding="utf-8")
    entries = [entry.strip() for entry in re.split(r"^(?=@)", text, flags=re.MULTILINE) if entry.strip()]
    return {entry.partition("{")[2].partition(",")[0].strip(): entry for entry in entries}


def cite(names: Sequence[str], as_json: bool = False) -> int:
    """Prints BibTeX entries.

    Args:
        names: BibTeX keys, searchers, guides or verifiers, whose papers are cited beside imgscale itself; all for none.
        as_json: As a list of objects with ``key`` and ``bibtex``.
    """
    known = references()
    keys = _keys(names, known) if names else list(known)
    if as_json:
        print_json([{"key": key, "bibtex": known[key]} for key in keys])
    else:
        print("\n\n".join(known[key] for key in keys))
    return 0


def _keys(names: Sequence[str], known: dict[str, str]) -> list[str]:
    from imgscale import registry

    sources = {key: [key] for key in known}
    for entry in (*registry.searcher, *registry.guide, *registry.verifier):
        sources.setdefault(entry.name, []).extend(entry.cite)  # dps is a searcher and a guide
    for name in names:
        if name not in sources:
            raise UnknownName("paper, searcher, guide or verifier", name, sources)
    return list(dict.fromkeys(["imgscale", *(key for name in names for key in sources[name])]))
