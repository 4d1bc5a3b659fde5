"""What a comparison leaves in its folder: rows for other programs, tables, plots and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from imgscale import files
from imgscale.app.bench import groups, page, plots, tables
from imgscale.app.bench import rows as store
from imgscale.app.bench.config import Config
from imgscale.app.bench.rows import Row


def write(
    folder: Path,
    rows: Sequence[Row],
    config: Config,
    kinds: Sequence[str] = (),
    left_out: Mapping[str, str] | None = None,
) -> dict[str, Path]:
    """Writes everything that is made of the rows, each file whole or not at all.

    Args:
        folder: Where the rows and their images are.
        rows: All of them, at least one.
        config: What to compare with, and what solved means.
        kinds: The categories of the prompts, in order.
        left_out: Searches that couldn't be run, and why.

    Returns:
        The files: "page", "tables", "csv", "parquet" where pyarrow is installed, and the plots by their names.
    """
    found = groups.groups(rows, config, kinds)
    drawn = {
        page.plot_name(group, axis): plots.plot(group, axis)
        for group in found
        if group.searchers
        for axis in plots.AXES
    }
    data = {
        "page": ("index.html", page.page(folder, found, drawn, config.dump(folder), left_out or {}).encode()),
        "tables": ("tables.md", markdown(found).encode()),
        "csv": ("rows.csv", store.to_csv(rows)),
        **{name: (f"plots/{name}.png", image) for name, image in drawn.items()},
    }
    if (parquet := store.to_parquet(rows)) is not None:
        data["parquet"] = ("rows.parquet", parquet)
    (folder / "plots").mkdir(exist_ok=True)
    for name, content in data.values():
        files.write(folder / name, content)
    return {key: folder / name for key, (name, _) in data.items()}


def markdown(found: Sequence[groups.Group]) -> str:
    """All tables, those over all models first."""
    parts = [table.markdown() for table in tables.summary(found)]
    for group in found:
        parts += [f"## {tables.escaped(group.title)}", *(table.markdown() for table in tables.section(group))]
    return "\n\n".join(parts) + "\n"
