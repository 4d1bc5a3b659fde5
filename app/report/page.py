"""The page about a batch run: sums at the top, and below them every prompt, to be sorted, filtered and opened."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from imgscale.app import pages
from imgscale.app.report.summary import Summary

NOSCRIPT = (
    '<noscript><p class="bad">This page needs JavaScript to show its images; it loads nothing from elsewhere.</p>'
    "</noscript>"
)


def page(title: str, items: Sequence[dict[str, Any]], summary: Summary, *, tiny: bool) -> str:
    """The page's HTML.

    Args:
        title: What the run is called.
        items: From `items.describe`.
        summary: From `summary.summary`.
        tiny: Whether pixels are shown as squares.
    """
    names = list(summary.names)
    data = {"names": names, "items": items, "tiny": tiny, "curve": summary.curve}
    tiles = "".join(f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for value, name in summary.tiles)
    curve = (
        '<div class="mean"><p class="note">Mean of the best so far, over all prompts.</p><div id="curve"></div></div>'
        if summary.curve
        else ""
    )
    return pages.document(
        title,
        f"<h1>{escape(title)}</h1>\n<p class='muted'>{escape(summary.line)}</p>\n<ul class='tiles'>{tiles}</ul>\n"
        f"<div class='sums'><div>{_table(summary)}</div>{curve}</div>\n{_failures(summary)}{_settings(summary)}\n"
        f"{_tools(items, names, summary.categories)}\n<ul id='cards'></ul><div id='more'></div>\n{NOSCRIPT}",
        package="imgscale.app.report",
        data=data,
    )


def _table(summary: Summary) -> str:
    if not summary.scores:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in summary.scores[0])
    rows = "".join(f"<tr>{''.join(f'<td>{_cell(text)}</td>' for text in row)}</tr>" for row in summary.scores[1:])
    note = "Brackets: 95% intervals by bootstrap over prompts; seeds of a prompt are averaged first."
    return (
        f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        f"<p class='note'>{note}</p>"
    )


def _cell(text: str) -> str:
    """A number, and what stands in brackets behind it smaller."""
    value, bracket, rest = text.partition(" (")
    return f"{escape(value)} <small>({escape(rest)}</small>" if bracket else escape(text)


def _failures(summary: Summary) -> str:
    if not summary.failures:
        return ""
    rows = "".join(f"<li>{count} × {escape(why)}</li>" for why, count in summary.failures)
    return f"<details open><summary class='bad'>Without an image</summary><ul>{rows}</ul></details>\n"


def _settings(summary: Summary) -> str:
    return f"<details><summary>The settings</summary><pre>{escape(summary.settings)}</pre></details>"


def _tools(items: Sequence[dict[str, Any]], names: Sequence[str], categories: Sequence[str]) -> str:
    kinds = "".join(f'<option value="={escape(kind)}">{escape(kind)}</option>' for kind in categories)
    failed = '<option value="!">without an image</option>' if any("error" in item for item in items) else ""
    kind = f'<select id="kind" aria-label="Category"><option value="">All</option>{kinds}{failed}</select>'
    plain = any("before" in item for item in items)
    by = [("order:0", "order")]
    by += [(f"score:{k}", name) for k, name in enumerate(names)]
    by += [(f"gain:{k}", f"gain in {name}") for k, name in enumerate(names)] if plain else []
    by += [("nfe:0", "NFE"), ("seconds:0", "seconds")]
    options = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in by)
    beside = '<label><input type="checkbox" id="beside" checked> plain beside</label>' if plain else ""
    return (
        '<div class="tools"><input type="search" id="text" placeholder="Words in the prompt" aria-label="Words in the'
        f' prompt">{kind if kinds or failed else ""}<label>Sort by <select id="by">{options}</select></label>'
        f'<button type="button" id="down" aria-label="Turn the order around">↑</button>{beside}'
        '<span id="count"></span></div>'
    )
