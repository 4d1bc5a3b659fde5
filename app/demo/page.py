"""The page and the API: what stands where, and which handler each button calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from imgscale.app.demo import view as html
from imgscale.app.demo.chart import chart
from imgscale.app.demo.handlers import Handlers
from imgscale.app.demo.offer import AUTO, EXAMPLES, LONGEST_PROMPT, Offer
from imgscale.app.demo.runner import Runner
from imgscale.bandit import MODES

HEAD = (
    '<header class="is-head"><h1>imgscale</h1>'
    "<p>Better images from an unchanged model, by searching at inference time.</p></header>"
)
BUDGET = 100  # NFE at the start, or what is allowed
HIDDEN: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
AT_ONCE: dict[str, Any] = {**HIDDEN, "queue": False}
UNQUEUED: dict[str, Any] = {**HIDDEN, "concurrency_limit": None}  # the line is ours, not gradio's


def build(runner: Runner, cache: Path) -> gr.Blocks:
    """The demo, ready to launch.

    Args:
        runner: Does its searches.
        cache: The folder that gradio serves.
    """
    offer, on = runner.offer, Handlers(runner, cache)
    with gr.Blocks(title="imgscale", analytics_enabled=False, delete_cache=(600, 3600)) as demo:
        _html(HEAD)
        with gr.Row(elem_id="is-main"):
            with gr.Column(elem_id="is-ask"):
                prompt, search, stop, budget, estimate = _ask(offer)
            with gr.Column(elem_id="is-result"):
                status = _html(html.note("Write a prompt, or take an example, and press Search."))
                stage = _html(html.stage())
                download = gr.DownloadButton("Download with settings", visible=False, size="sm", elem_id="is-download")
                plot, ledger, gallery, settings = _html(chart((), "", 1)), _html(), _html(), _html()
            with gr.Column(elem_id="is-more"):
                model, mode, searcher, verifiers, report, seed, drop = _more(offer)
        form = [prompt, model, searcher, verifiers, report, budget, seed, mode]
        parts = [status, stage, plot, ledger, gallery, download, settings, search, stop]
        _api(on, form)  # first, or the page's own handlers would take its names
        chosen = [model, searcher, verifiers, budget]
        searched = gr.on([search.click, prompt.submit], on.search, form, parts, **UNQUEUED)
        searched.then(on.estimate, chosen, estimate, **AT_ONCE)
        drop.upload(on.again, drop, [*parts, *form, drop], **UNQUEUED)
        stop.click(on.stop, None, stop, **AT_ONCE)
        gr.on([searcher.change, verifiers.change, budget.change], on.estimate, chosen, estimate, **AT_ONCE)
        gr.on([model.change, demo.load], on.fits, model, [mode, searcher, verifiers], **AT_ONCE)
        gr.on([model.change, demo.load], on.measure, chosen, estimate, **UNQUEUED)
        demo.unload(on.close)
    return demo


def _html(text: str = "") -> gr.HTML:
    """Markup that only our own styles apply to."""
    return gr.HTML(text, apply_default_css=False)


def _ask(offer: Offer) -> tuple[gr.Textbox, gr.Button, gr.Button, gr.Slider, gr.HTML]:
    prompt = gr.Textbox(
        EXAMPLES[0], label="Prompt", lines=3, max_lines=6, max_length=LONGEST_PROMPT, elem_id="is-prompt"
    )
    with gr.Row(elem_id="is-examples"):
        for example in EXAMPLES[1:]:
            chip = gr.Button(example, size="sm")
            chip.click(None, None, prompt, js=f"() => {example!r}", **HIDDEN)
    budget = gr.Slider(
        1,
        offer.max_budget,
        min(BUDGET, offer.max_budget),
        step=1,
        label="Budget (model evaluations)",
        elem_id="is-budget",
    )
    estimate = _html()
    with gr.Row(elem_id="is-buttons"):
        search = gr.Button("Search", variant="primary", elem_id="is-search")
        stop = gr.Button("Stop", interactive=False, elem_id="is-stop")
    return prompt, search, stop, budget, estimate


def _more(offer: Offer) -> tuple[gr.Dropdown, gr.Radio, gr.Dropdown, gr.Dropdown, gr.Dropdown, gr.Textbox, gr.File]:
    model = gr.Dropdown(list(offer.models), value=offer.models[0], label="Model", elem_id="is-model")
    mode = gr.Radio(
        list(MODES),
        value=offer.usual_mode,
        label="Mode",
        info="The model, the searcher and what is spent are chosen for each prompt, by quality and cost.",
        visible=offer.models[0] == AUTO,
        elem_id="is-mode",
    )
    searcher = gr.Dropdown(list(offer.searchers), value=offer.searchers[0], label="Searcher", elem_id="is-searcher")
    verifiers = gr.Dropdown(
        list(offer.verifiers),
        value=[offer.verifiers[0]],
        multiselect=True,
        label="Steered by",
        info="Several are an ensemble.",
        elem_id="is-verifiers",
    )
    report = gr.Dropdown(
        list(offer.verifiers),
        value=[],
        multiselect=True,
        label="Held-out judges",
        info="They never steer. Left empty: the shapes oracle, where it can read the prompt.",
        elem_id="is-report",
    )
    seed = gr.Textbox("0", label="Seed", max_lines=1, max_length=19, elem_id="is-seed")
    _html('<p class="is-label">Run again from a PNG</p>')
    drop = gr.File(
        label="A PNG with imgscale's settings inside",
        show_label=False,
        file_types=[".png"],
        height=92,
        elem_id="is-drop",
    )
    return model, mode, searcher, verifiers, report, seed, drop


def _api(on: Handlers, form: list[Any]) -> None:
    """The endpoints that programs call; see docs/demo.md."""
    image, plain = gr.File(visible=False, label="image"), gr.File(visible=False, label="plain")
    result, answer = gr.JSON(visible=False, label="result"), gr.JSON(visible=False, label="answer")
    picture = gr.File(visible=False, label="picture", file_types=[".png"])
    call = gr.Button(visible=False)
    told: list[Any] = [image, plain, result]
    call.click(on.api_search, form, told, api_name="search", concurrency_limit=None)
    call.click(on.api_rerun, picture, told, api_name="rerun", concurrency_limit=None)
    call.click(on.api_stop, None, answer, api_name="stop", queue=False)
    call.click(on.api_choices, None, answer, api_name="choices", queue=False)
