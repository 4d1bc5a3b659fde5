"""How the page looks: ink on paper and one accent, the colours of the plots that `imgscale generate` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.themes.utils.fonts import LocalFont

CSS = Path(__file__).parent / "style.css"
SCRIPT = Path(__file__).parent / "page.js"


def theme() -> Any:
    """The theme; its fonts are the ones that gradio ships, so that nothing is fetched from elsewhere."""
    weights = (400, 700)  # gradio's file of weight 600 lacks the Latin letters
    ink, paper, line, accent = "#1b1b1f", "#ffffff", "#e3e3e8", "#1f5fbf"
    night, panel, edge, light = "#131316", "#1b1b20", "#303038", "#7fabf2"
    return gr.themes.Base(
        radius_size=gr.themes.sizes.radius_sm,
        text_size=gr.themes.sizes.text_md,
        spacing_size=gr.themes.sizes.spacing_md,
        font=(LocalFont("IBM Plex Sans", weights), "ui-sans-serif", "system-ui", "sans-serif"),
        font_mono=(LocalFont("IBM Plex Mono", weights), "ui-monospace", "monospace"),
    ).set(
        body_background_fill="#fafaf8",
        body_background_fill_dark=night,
        body_text_color=ink,
        body_text_color_dark="#ececf0",
        body_text_color_subdued="#6b6b76",
        body_text_color_subdued_dark="#9a9aa6",
        background_fill_primary=paper,
        background_fill_primary_dark=panel,
        background_fill_secondary="#f4f4f2",
        background_fill_secondary_dark="#222228",
        border_color_primary=line,
        border_color_primary_dark=edge,
        border_color_accent=accent,
        border_color_accent_dark=light,
        color_accent=accent,
        color_accent_soft="#e8f0fb",
        color_accent_soft_dark="#1d2a40",
        block_background_fill="transparent",
        block_background_fill_dark="transparent",
        block_border_width="0px",
        block_border_width_dark="0px",
        block_shadow="none",
        block_shadow_dark="none",
        block_padding="0",
        block_title_text_weight="500",
        block_title_text_size="13px",
        block_title_text_color="#4a4a54",
        block_title_text_color_dark="#b6b6c2",
        block_info_text_size="12px",
        block_label_background_fill="transparent",
        block_label_background_fill_dark="transparent",
        block_label_border_width="0px",
        block_label_border_width_dark="0px",
        block_label_text_weight="500",
        input_background_fill=paper,
        input_background_fill_dark=panel,
        input_border_color=line,
        input_border_color_dark=edge,
        input_border_color_focus=accent,
        input_border_color_focus_dark=light,
        input_border_width="1px",
        input_border_width_dark="1px",
        input_shadow="none",
        input_shadow_dark="none",
        input_shadow_focus="none",
        input_shadow_focus_dark="none",
        slider_color=accent,
        slider_color_dark=light,
        button_primary_background_fill=ink,
        button_primary_background_fill_dark="#ececf0",
        button_primary_background_fill_hover="#33333a",
        button_primary_background_fill_hover_dark="#ffffff",
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark=ink,
        button_primary_border_color=ink,
        button_primary_border_color_dark="#ececf0",
        button_secondary_background_fill=paper,
        button_secondary_background_fill_dark=panel,
        button_secondary_background_fill_hover="#f4f4f2",
        button_secondary_background_fill_hover_dark="#26262d",
        button_secondary_border_color=line,
        button_secondary_border_color_dark=edge,
        button_large_text_weight="500",
        button_primary_shadow="none",
        button_secondary_shadow="none",
    )
