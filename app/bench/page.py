"""One HTML page about a comparison, with everything inside: it needs no network and no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from imgscale.app import pages
from imgscale.app.bench import tables
from imgscale.app.bench.groups import Group, short
from imgscale.app.bench.prompts import Prompt, spread
from imgscale.app.bench.rows import PLAIN, Row
from imgscale.app.bench.statistics import score
from imgscale.app.bench.tables import Table

SHOWN = 16  # prompts in a grid
SIDE = 128  # pixels: larger images are shrunk

STYLE = """
:root { --ink: #1b1b1f; --muted: #62626d; --line: #e3e3e8; --soft: #f6f6f8; --good: #00664b; --bad: #b34a00; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 36px 28px 60px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 52px 0 4px; padding-top: 18px; border-top: 2px solid var(--ink); }
h3 { font-size: 15px; margin: 30px 0 8px; }
p { margin: 6px 0; max-width: 80ch; }
.muted, .note { color: var(--muted); }
.note { font-size: 13px; }
nav { margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
a { color: #0059a0; }
.wide { overflow-x: auto; margin: 0 -4px; padding: 0 4px; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--muted); padding: 4px 10px; border-bottom: 1.5px solid var(--ink);
  vertical-align: bottom; }
td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--line); white-space: nowrap;
  vertical-align: top; }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0; background: #fff; }
td:first-child { font-weight: 600; min-width: 110px; max-width: 340px; white-space: normal; overflow-wrap: break-word; }
td.text, th.text { text-align: left; }
td small { color: var(--muted); font-size: 12px; }
img.plot { display: block; max-width: 100%; height: auto; margin: 18px 0 6px; }
.grid td { text-align: left; vertical-align: top; padding: 9px 10px 7px; }
.grid td:first-child { width: 210px; font-weight: 400; white-space: normal; }
.grid th { text-align: left; max-width: 150px; overflow-wrap: anywhere; }
.grid img { display: block; width: 112px; height: 112px; object-fit: contain; background: var(--soft);
  border: 1px solid var(--line); border-radius: 3px; }
.grid img.tiny { image-rendering: pixelated; }
.good img { border: 2px solid var(--good); } .bad img { border: 2px dashed var(--bad); }
.mark { font-size: 12px; display: block; margin-top: 3px; color: var(--muted); }
.good b { color: var(--good); } .bad b { color: var(--bad); }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 4px; padding: 12px 14px; overflow-x: auto;
  font-size: 13px; line-height: 1.45; }
details { margin-top: 14px; } summary { cursor: pointer; font-weight: 600; }
@media print { body { max-width: none; padding: 0; } h2 { break-before: page; } }
"""

READING = """
<p>Every search starts from the same noises for the same prompt and seed, and nothing is selected afterwards. Brackets
hold 95% intervals by bootstrap over prompts (seeds of a prompt are averaged first): how far the number might be off
had other prompts of the same kind been drawn. Where all prompts agree (0 or 100%) the bootstrap has no width; with n
prompts the truth may then still be some 3/n away.</p>
<p>NFE counts model evaluations per image; with classifier-free guidance the two passes count as one.</p>
"""


def page(
    folder: Path, found: Sequence[Group], plots: Mapping[str, bytes], yaml: str, left_out: Mapping[str, str]
) -> str:
    """The page's HTML.

    Args:
        folder: Where the images are.
        found: What to show.
        plots: PNGs by what `plot_name` gives.
        yaml: The configuration.
        left_out: Searches that couldn't be run, and why.
    """
    rows = [row for group in found for row in group.all]
    prompts = len({row["prompt"] for row in rows})
    seeds = len({row["seed"] for row in rows})
    searchers = len({row["searcher"] for row in rows} - {PLAIN})
    made = "; ".join(
        sorted({f"imgscale {r['imgscale']}, torch {r['torch']}, {r['device']}, {r['dtype']}" for r in rows})
    )
    body = [
        "<h1>Searches compared</h1>",
        f'<p class="muted">{_count(searchers, "searcher")} on {_count(prompts, "prompt")} with {_count(seeds, "seed")}:'
        f" {_count(len(rows), 'row')}. {escape(made)}</p>",
        "<nav>"
        + "".join(f'<a href="#g{i}">{escape(group.title)}</a>' for i, group in enumerate(found))
        + '<a href="#reading">How to read this</a></nav>',
        *(_table(table) for table in tables.summary(found)),
    ]
    if left_out:
        items = "".join(f"<li><b>{escape(what)}</b>: {escape(why)}</li>" for what, why in left_out.items())
        body.append(f"<h3>Left out</h3><ul>{items}</ul>")
    for i, group in enumerate(found):
        body += [f'<h2 id="g{i}">{escape(group.title)}</h2>', *_section(folder, group, plots)]
    body += [
        '<h2 id="reading">How to read this</h2>',
        READING,
        f"<details><summary>The configuration</summary><pre>{escape(yaml)}</pre></details>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Searches compared</title>\n<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n"
        "</html>\n"
    )


def plot_name(group: Group, axis: str) -> str:
    """The file name of a plot, without its ending."""
    from imgscale.app.outputs import slug

    return f"{slug(f'{short(group.model)} {group.verifier}')}-{axis}"


def _section(folder: Path, group: Group, plots: Mapping[str, bytes]) -> list[str]:
    parts = []
    if not group.searchers:
        return [*map(_table, tables.section(group)), _grid(folder, group)]
    for axis, what in (("nfe", "model evaluations"), ("seconds", "seconds")):
        uri = pages.uri(plots[plot_name(group, axis)], "png")
        parts.append(f'<img class="plot" src="{uri}" alt="Best so far against {what}; the tables hold the numbers.">')
    parts.append(
        '<p class="note">Markers: where the runs with each budget ended, with 95% bands; lines of steering'
        " scores solid, of held-out ones dashed. Thin lines: the best so far within the runs with the largest"
        " budget.</p>"
    )
    return [*parts, *map(_table, tables.section(group)), _grid(folder, group)]


def _table(table: Table) -> str:
    texts = {i for i, name in enumerate(table.head) if name == "model"}
    kind = [' class="text"' if i in texts else "" for i in range(len(table.head))]
    head = "".join(f"<th{k}>{escape(name)}</th>" for k, name in zip(kind, table.head, strict=True))
    lines, above = "", None
    for line in table.lines:
        named = ["" if line[0] == above else line[0], *line[1:]]  # a name once is enough
        cells = "".join(f"<td{k}>{_cell(cell)}</td>" for k, cell in zip(kind, named, strict=True))
        lines, above = f"{lines}<tr>{cells}</tr>\n", line[0]
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f"<h3>{escape(table.title)}</h3>\n"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>{note}'
    )


def _cell(text: str) -> str:
    """A number, and what stands in brackets behind it smaller."""
    value, bracket, spread = text.partition(" (")
    return f"{escape(value)} <small>({escape(spread)}</small>" if bracket and " to " in spread else escape(text)


def _grid(folder: Path, group: Group) -> str:
    """Winners, prompt by searcher, at the largest budget that most searchers were run with."""
    if not group.budgets:
        return ""
    budget = max(group.budgets, key=lambda b: (sum((name, b) in group.rows for name in group.searchers), b))
    columns = [(PLAIN, 0)] if (PLAIN, 0) in group.rows else []
    columns += [(name, budget) for name in group.searchers if (name, budget) in group.rows]
    seed = min(row["seed"] for row in group.all)
    cells = {(row["prompt"], at): row for at in columns for row in group.rows[at] if row["seed"] == seed}
    known = {row["prompt"]: Prompt(row["prompt"], row["columns"]) for row in cells.values()}
    order = sorted(known.values(), key=lambda p: group.kinds.index(p.category) if p.category in group.kinds else -1)
    chosen = [prompt for prompt in order if prompt in spread(order)[:SHOWN]]
    head = "".join(f"<th>{escape(_column(*at))}</th>" for at in columns)
    lines = ""
    for prompt in chosen:
        images = "".join(f"<td>{_image(folder, cells.get((prompt.text, at)), group)}</td>" for at in columns)
        kind = f'<br><span class="note">{escape(prompt.category)}</span>' if prompt.category else ""
        lines += f"<tr><td>{escape(prompt.text)}{kind}</td>{images}</tr>\n"
    return (
        f"<h3>Samples with seed {seed}</h3>\n"
        f'<p class="note">{_said_of(chosen, known)} Marked by {escape(group.by.label)}.</p>\n'
        f'<div class="wide"><table class="grid"><thead><tr><th>prompt</th>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def _said_of(chosen: Sequence[Prompt], known: Mapping[str, Prompt]) -> str:
    if len(chosen) == len(known):
        return "All prompts."
    return f"{len(chosen)} of {len(known)} prompts, spread over the list and its categories without looking at images."


def _column(searcher: str, budget: int) -> str:
    return "one plain sample" if searcher == PLAIN else f"{searcher}, {budget} NFE"


def _image(folder: Path, row: Row | None, group: Group) -> str:
    data = row and _read(folder / "images" / Path(row["image"]).name)
    if not row or not data:
        return "–"
    uri, tiny = data
    value = score(row, group.by.name)
    text = f"{group.by.name} {'–' if value is None else f'{value:.2f}'}"
    if group.steers != group.by.name and row["score"] is not None:
        text += f" · {group.steers} {row['score']:.2f}"
    kind, mark = "", ""
    if group.by.at_least is not None:
        kind, mark = ("good", "<b>✓ right</b> ") if group.by(row) else ("bad", "<b>✗ wrong</b> ")
    pixels = ' class="tiny"' if tiny else ""
    return (
        f'<div class="{kind}"><img{pixels} src="{uri}" alt="{escape(row["prompt"])}, by {escape(row["searcher"])}">'
        f'<span class="mark">{mark}<br>{escape(text)}</span></div>'
    )


def _read(path: Path) -> tuple[str, bool] | None:
    """An image as a data URI, small enough for a page of many, and whether its pixels should be shown as squares."""
    from PIL import Image

    try:
        with Image.open(path, formats=["PNG"]) as image:
            return pages.embedded(image, 2 * SIDE)
    except OSError:
        return None


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
