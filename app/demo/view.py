"""The page's moving parts as HTML. Whatever came from outside is escaped; pictures are inside the markup itself."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from imgscale.app.auto import AutoJob
from imgscale.app.demo.desk import View
from imgscale.app.demo.pace import span
from imgscale.app.job import Job

if TYPE_CHECKING:
    from PIL.Image import Image

    from imgscale.budget import Ledger
    from imgscale.result import Candidate

LARGEST, SMALL = 768, 192  # pixels of the longer side, on the stage and in the gallery
TINY = 320  # what is smaller is shown pixel by pixel
REASONS = {
    "budget": "The budget is spent.",
    "complete": "The search is complete.",
    "ceiling": "The score can't get any higher.",
    "deadline": "The time is up.",
    "cancelled": "Stopped: this is the best so far.",
    "verifier": "The verifier failed for every image, so that nothing could be ranked.",
}


def note(text: str, kind: str = "idle") -> str:
    """A status line with a sentence alone; ``kind`` is "idle" or "failed"."""
    return f'<div class="is-status" role="status" aria-live="polite" data-state="{kind}"><p>{escape(text)}</p></div>'


def status(view: View, job: Job, stopping: bool = False) -> str:
    """What is going on, how far it is, and how long it will take."""
    share = 0.0
    facts: list[str] = []
    if view.state == "waiting":
        title = "Starting"
        if view.ahead:
            title = "Next in line" if view.ahead == 1 else f"Number {view.ahead} in line"
            facts = [f"{view.ahead} search{'es' * (view.ahead > 1)} before yours"]
    elif view.state == "loading":
        title, facts = "Loading", [job.model]
        if isinstance(job, AutoJob):
            title, facts = "Choosing", ["a model and a search, and loading the model"]
    elif view.state == "searching":
        title = "Stopping" if stopping else "Searching" if view.nfe else "Drawing the plain sample"
        share = view.nfe / view.total if view.total else 0.0
        facts = [f"{view.nfe} of {view.total} NFE"]
        if view.trace and math.isfinite(view.trace[-1].score):
            facts.append(f"best {job.judge} {view.trace[-1].score:.4f}")
        if view.nfe and view.total and not stopping:
            facts.append(f"{span(view.seconds * (view.total - view.nfe) / view.nfe)} left")
    elif view.state == "left":
        title, facts = "Stopped", ["before there was an image"]
    elif view.state == "failed":
        return note(view.said, "failed")
    else:
        assert view.output is not None
        title, share = "Stopped" if view.output.stopped == "cancelled" else "Done", 1.0
        facts = [view.said or REASONS[view.output.stopped], *view.output.events]
        if view.output.stopped == "cancelled":
            share = view.nfe / view.total if view.total else 1.0
    said = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    chosen = f'<p class="chosen">{escape(view.chosen)}</p>' if view.chosen else ""
    return (
        f'<div class="is-status" role="status" aria-live="polite" data-state="{view.state}">'
        f"<p><strong>{title}</strong>{said}</p>{chosen}"
        f'<div class="bar"><i style="width:{100 * min(share, 1):.1f}%"></i></div></div>'
    )


def stage(view: View | None = None, job: Job | None = None, given: Image | None = None) -> str:
    """Two pictures: the plain sample, or the one that is made again, and what the search has."""
    left_name, left_scores, left_cost = ("your picture" if given else "plain sample"), "", ""
    left = right = None
    right_name, right_scores, right_cost = "searched", "", ""
    if view is not None and job is not None:
        output = view.output
        right_name = "search" if isinstance(job, AutoJob) else f"{job.searcher} search"
        if output is not None:
            right_name = f"{output.searcher} search"
        left, right = given, view.preview
        if view.state == "searching" and view.trace:
            right_name, right_scores = "best so far", _scores({job.judge: view.trace[-1].score})
        elif view.state == "searching":
            right_name = "preview"
        if output is not None:
            right, right_cost = output.images[0], f"{output.nfe} NFE"
            right_scores = _scores(output.scores)
            right_name = right_name if output.finished else "preview, nothing finished yet"
            if output.plain is not None and given is None:
                left, left_cost = output.plain.image, f"{output.plain.ledger.nfe} NFE"
                left_scores = _scores(output.plain.scores)
    empty = "comes at the end" if view and not view.over else ""
    return (
        '<div class="is-stage">'
        + _figure("plain", left, left_name, left_scores, left_cost, empty)
        + _figure("best", right, right_name, right_scores, right_cost, "")
        + "</div>"
    )


def _figure(kind: str, image: Image | None, name: str, scores: str, cost: str, empty: str) -> str:
    shown = f'<div class="blank">{escape(empty)}</div>'
    if image is not None:
        shown = f'<img alt="{escape(name)}" src="{data(image, LARGEST)}"{_pixelated(image)}>'
    return (
        f'<figure data-of="{kind}">{shown}<figcaption><b>{escape(name)}</b><span>{cost}</span>'
        f"<em>{scores or '&nbsp;'}</em></figcaption></figure>"
    )


def gallery(candidates: Sequence[Candidate], verifier: str) -> str:
    """The best finished candidates with their scores; a click copies a seed."""
    from imgscale.images import to_pil

    if not candidates:
        return ""
    cells = []
    for i, candidate in enumerate(candidates):
        image = to_pil(candidate.image)
        cells.append(
            f'<button type="button" class="cell" data-copy="{candidate.seed}" title="Copy the seed {candidate.seed}">'
            f'<img alt="candidate {i + 1}" src="{data(image, SMALL)}"{_pixelated(image)}>'
            f"<b>{_number(candidate.score)}</b></button>"
        )
    return (
        f'<section class="is-gallery"><h3>Finished candidates <span>best by {escape(verifier)} first</span></h3>'
        f'<div class="cells">{"".join(cells)}</div></section>'
    )


def ledger(spent: Ledger, seconds: float) -> str:
    """What was spent."""
    entries = {
        "model evaluations": spent.nfe,
        "verifier calls": spent.verifier_calls,
        "held-out calls": spent.report_calls,
        "decodes": spent.decodes,
        **({"gradients": spent.gradients} if spent.gradients else {}),
        "seconds": f"{seconds:.1f}",
    }
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in entries.items())
    return f'<dl class="is-ledger">{cells}</dl>'


def settings(*jobs: Job) -> str:
    """Searches as a command line and as Python, each with a button that copies it.

    Args:
        jobs: What was asked for; or, if a bandit chose, what it chose, and then what was asked for.
    """
    blocks = []
    for title, text in (pair for job in jobs for pair in _texts(job)):
        blocks.append(
            f'<section><h3>{title} <button type="button" class="copy" data-copy="{escape(text)}">copy</button></h3>'
            f"<pre>{escape(text)}</pre></section>"
        )
    return f'<div class="is-settings">{"".join(blocks)}</div>'


def _texts(job: Job) -> list[tuple[str, str]]:
    auto = " for auto" if isinstance(job, AutoJob) else ""
    return [(f"Command line{auto}", job.command()), (f"Python{auto}", python(job))]


def python(job: Job) -> str:
    """Python that makes the image of a job again; a bandit's chooses by what its own policy knows then."""
    bandit = isinstance(job, AutoJob)
    loading: dict[str, Any] = {"device": job.device, "dtype": job.dtype and f"torch.{job.dtype}"}
    if isinstance(job, AutoJob):
        paths = {"policy": job.policy, "pool": job.pool}
        loading |= {"mode": job.mode, **{name: None if path is None else str(path) for name, path in paths.items()}}
    where = "".join(f", {k}={v if k == 'dtype' else repr(v)}" for k, v in loading.items() if v is not None)
    limits = job.budget
    given = {
        "negative_prompt": job.negative,
        **({} if bandit else {"searcher": job.searcher, "guide": job.guide, "verifier": job.verifier}),
        **{"report": list(job.report) or None, "budget": limits.nfe, "seed": job.seed},
        **{"height": job.height, "width": job.width, "num_inference_steps": job.steps, "guidance_scale": job.guidance},
        **{"options": dict(job.options) or None, "preview": job.preview, "verifier_timeout": job.verifier_timeout},
    }
    arguments = [repr(job.prompt), *(f"{name}={value!r}" for name, value in given.items() if value is not None)]
    name = "auto" if bandit else "scaler"
    lines = [
        *(["import torch"] if job.dtype else []),
        "import imgscale\n",
        f"{name} = imgscale.load({job.model!r}{where})",
        f"out = {name}(",
        *(f"    {argument}," for argument in arguments),
        ")",
        'out.images[0].save("image.png")',
    ]
    return "\n".join(lines)


def data(image: Image, largest: int) -> str:
    """A picture as a data URI: PNG if it is small, and a JPEG of at most ``largest`` pixels a side otherwise."""
    image = image.convert("RGB")
    file = io.BytesIO()
    if max(image.size) <= TINY:
        image.save(file, "PNG")
        kind = "png"
    else:
        image.thumbnail((largest, largest))
        image.save(file, "JPEG", quality=88)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _pixelated(image: Image) -> str:
    return ' class="tiny"' if max(image.size) <= TINY else ""


def _scores(scores: Mapping[str, float]) -> str:
    return " · ".join(f"{escape(name)} {_number(score)}" for name, score in scores.items())


def _number(score: float) -> str:
    return f"{score:.3f}" if math.isfinite(score) else "–"
