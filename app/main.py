"""The `imgscale` command: options, help, and mistakes said in one sentence. What the commands do lies beside this file.

Nothing heavy is imported here, so that ``--help`` answers at once. Numbers are read by `imgscale.app.checks`, not by
typer, whose messages name neither what is allowed nor what to do.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

import imgscale
from imgscale.app import checks
from imgscale.app.batch import command as batch
from imgscale.app.bench import bandit_command
from imgscale.app.bench import command as bench
from imgscale.app.console import CANCELLED, complain
from imgscale.app.demo import command as demo
from imgscale.app.export import command as export
from imgscale.app.grid import command as grid
from imgscale.app.policy import command as policies
from imgscale.app.report import command as report
from imgscale.errors import UnknownName, UserError

# Click's base of all usage errors, wherever this release of typer keeps its click.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    cls=bandit_command.Words,
    help="Better images from unchanged text-to-image models, by searching at inference time.",
    epilog='Try: imgscale generate "two red circles above a blue square"',
    add_completion=False,
    rich_markup_mode=None,  # plain help takes half the time of the framed one
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_FLAG = " "  # rather than typer's <bool>
_JSON = typer.Option(
    False, "--json", metavar=_FLAG, help="Print JSON for machines, and nothing else, on standard output."
)
_QUIET = typer.Option(False, "--quiet", "-q", metavar=_FLAG, help="Show no progress and no table.")
_DEVICE = typer.Option(None, metavar="NAME", help="cpu, cuda, cuda:1, mps; the accelerator if there is one.")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", metavar=_FLAG, help="Print the version.")) -> None:
    if version:
        print(f"imgscale {imgscale.__version__}")
        raise typer.Exit()


@app.command(
    help="Search for the image that the verifier likes best.\n\nWrites the image with its settings inside,"
    " a plot of the best score against NFE, and the plain image of the same seed beside it. Ctrl-C keeps the best so"
    " far."
)
def generate(
    context: typer.Context,
    prompt: str = typer.Argument(..., metavar="PROMPT", help="What the image should show."),
    model: str = typer.Option(
        "shapes-flow", "--model", "-m", metavar="NAME", help="Bundled name, folder, hub id, or auto."
    ),
    searcher: str = typer.Option("rbf", "--searcher", "-s", metavar="NAME", help="How to search (imgscale list)."),
    guide: str | None = typer.Option(None, metavar="NAME", help="Bends the searcher's steps (imgscale list guides)."),
    settings: list[str] = typer.Option([], "--set", metavar="OPTION=VALUE", help="The searcher's option; repeatable."),
    verifier: str = typer.Option("clip", "--verifier", "-v", metavar="NAME", help="What to steer by (imgscale list)."),
    report: list[str] = typer.Option(
        [], metavar="NAME", help="Held-out judge, repeatable, or none; the shapes oracle where it fits."
    ),
    budget: str | None = typer.Option(
        None, "--budget", "-b", metavar="NFE", help="Model evaluations, never exceeded; 200, and with auto no limit."
    ),
    seconds: str | None = typer.Option(None, metavar="S", help="Also a limit on the time of the search."),
    eflops: str | None = typer.Option(None, metavar="E", help="Also a limit on eFLOPs, such as 2e12 (imgscale cost)."),
    seed: str = typer.Option("0", metavar="INT", help="Same seed, same image."),
    steps: str | None = typer.Option(None, metavar="INT", help="Steps of an ordinary sample; the model's default."),
    guidance: str | None = typer.Option(None, metavar="SCALE", help="Guidance scale; the model's default."),
    height: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    width: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    negative: str | None = typer.Option(None, metavar="TEXT", help="What guidance steers away from."),
    device: str | None = _DEVICE,
    dtype: str | None = typer.Option(None, metavar="NAME", help="float32, bfloat16 or float16."),
    distilled: bool = typer.Option(
        False, "--distilled", metavar=_FLAG, help="The model is a few-step one; bundled ones say so themselves."
    ),
    out: Path = typer.Option(Path("imgscale-out"), "--out", "-o", metavar="FOLDER", help="Where files go."),
    journal: Path | None = typer.Option(
        None, metavar="FOLDER", help="Keep the search there as it goes on; the same command resumes it."
    ),
    preview: str | None = typer.Option(
        None, metavar="NAME", help="What decodes previews: full, tiny, linear, a folder or hub id; the model's default."
    ),
    verifier_timeout: str | None = typer.Option(
        None, metavar="S", help="Longest time of one call of a verifier; no limit."
    ),
    early_exit: str = typer.Option(
        "off", metavar="MODE", help="Stop hopeless candidates: off, calibrated, paper, or 'calibrated(delta=0.1)'."
    ),
    mode: str | None = typer.Option(
        None, metavar="MODE", help="Of --model auto: cost, balanced, quality, or the weight of quality."
    ),
    policy: Path | None = typer.Option(None, metavar="FILE", help="Of --model auto: what it has learned."),
    pool: Path | None = typer.Option(None, metavar="FILE", help="Of --model auto: what it chooses from (TOML)."),
    no_plain: bool = typer.Option(
        False, "--no-plain", metavar=_FLAG, help="Don't make the plain image to compare with."
    ),
    save_noise: bool = typer.Option(
        False,
        "--save-noise",
        metavar=_FLAG,
        help="Also write the noise, from which rerun makes the image in one trajectory.",
    ),
    as_json: bool = _JSON,
    quiet: bool = _QUIET,
) -> None:
    from imgscale.app import auto
    from imgscale.app.job import Job, default_report
    from imgscale.budget import Budget

    number = {
        "seed": checks.whole(seed, "--seed", 0, checks.LARGEST),
        "steps": checks.whole(steps, "--steps", 1, 1000),
        "height": checks.whole(height, "--height", 1, 16384),
        "width": checks.whole(width, "--width", 1, 16384),
    }
    limits = Budget(
        nfe=checks.whole(budget, "--budget", 1) or (auto.NO_LIMIT if model == "auto" else 200),
        seconds=checks.positive(seconds, "--seconds"),
        eflops=checks.positive(eflops, "--eflops"),
    )
    job = Job(
        prompt=checks.prompt(prompt),
        negative=negative,
        model=model,
        searcher=searcher,
        guide=guide,
        options=checks.options(settings),
        verifier=verifier,
        report=tuple(name for name in report if name != "none") if report else default_report(model, prompt),
        budget=limits,
        seed=number["seed"] or 0,
        steps=number["steps"],
        guidance=checks.positive(guidance, "--guidance", zero=True),
        height=number["height"],
        width=number["width"],
        device=device,
        dtype=checks.dtype(dtype),
        distilled=distilled,
        plain=not no_plain,
        journal=journal,
        preview=preview,
        verifier_timeout=checks.positive(verifier_timeout, "--verifier-timeout"),
        early_exit=early_exit,
        save_noise=save_noise,
    )
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    job = auto.asked(job, mode, policy, pool, report, given)

    def work() -> int:
        from imgscale.app import generate

        return generate.generate(job, out, as_json=as_json, quiet=quiet)

    _do(work)


@app.command()
def rerun(
    picture: Path = typer.Argument(..., metavar="FILE", help="A PNG that generate wrote, or its .noise.safetensors."),
    model: str | None = typer.Option(
        None,
        "--model",
        "-m",
        metavar="NAME",
        help="Needed if the model isn't bundled: a picture can't say what to load.",
    ),
    verifier: str | None = typer.Option(
        None,
        "--verifier",
        "-v",
        metavar="NAME",
        help="Needed if the picture's verifier has options, for the same reason.",
    ),
    preview: str | None = typer.Option(None, metavar="NAME", help="Needed if the picture's previews came from a file."),
    device: str | None = _DEVICE,
    out: Path | None = typer.Option(None, "--out", "-o", metavar="FOLDER", help="Where it goes; beside the picture."),
    as_json: bool = _JSON,
    quiet: bool = _QUIET,
) -> None:
    """Make a picture again from the settings inside it.

    Of a .noise.safetensors by one trajectory, without the search.
    The exit status is 0 if every pixel is the same, and 1 if not.
    """

    def work() -> int:
        from imgscale.app import remake, rerun

        if picture.suffix == ".safetensors":
            remake.refuse(verifier=verifier, preview=preview)
            return remake.remake(picture, model=model, device=device, out=out, as_json=as_json, quiet=quiet)
        return rerun.rerun(
            picture,
            model=model,
            verifier=verifier,
            preview=preview,
            device=device,
            out=out,
            as_json=as_json,
            quiet=quiet,
        )

    _do(work)


@app.command()
def score(
    image: list[Path] = typer.Argument(
        ..., metavar="IMAGE...", help="Files, folders, or a CSV, TSV or JSONL with columns image and prompt."
    ),
    prompt: str | None = typer.Option(None, "--prompt", "-p", metavar="TEXT", help="For all; else each image's own."),
    verifier: list[str] = typer.Option(
        ["clip"], "--verifier", "-v", metavar="NAMES", help="One or several, a,b; repeatable (imgscale list)."
    ),
    recursive: bool = typer.Option(False, "--recursive", "-r", metavar=_FLAG, help="Also folders within folders."),
    sort: str | None = typer.Option(None, metavar="NAME", help="The best by this verifier first."),
    top: str | None = typer.Option(None, metavar="N", help="Only the best so many, by the first verifier or --sort."),
    max_batch: str = typer.Option("32", metavar="N", help="Images per call of a verifier."),
    device: str | None = _DEVICE,
    csv: str | None = typer.Option(None, metavar="FILE", help="Write a CSV there; - is standard output."),
    as_json: bool = _JSON,
    quiet: bool = _QUIET,
) -> None:
    """Score images that are there already.

    A prompt comes from --prompt, from a table of pairs, or from the image itself, where imgscale and A1111 write it.
    The exit status is 1 if a score is missing.
    """
    best, batch = checks.whole(top, "--top", 1), checks.whole(max_batch, "--max-batch", 1)

    def work() -> int:
        from imgscale.app import score

        return score.score(
            image,
            verifier,
            prompt=prompt,
            recursive=recursive,
            sort=sort,
            top=best,
            max_batch=batch or 32,
            device=device,
            csv=csv,
            as_json=as_json,
            quiet=quiet,
        )

    _do(work)


app.command(help=batch.HELP)(batch.batch)
app.command(help=bench.HELP)(bench.bench)
app.command(name=bandit_command.NAME, help=bandit_command.HELP)(bandit_command.bench_bandit)
app.add_typer(policies.app, name="policy")
app.command(help=demo.HELP)(demo.demo)
app.command(help=grid.HELP)(grid.grid)
app.command(help=report.HELP)(report.report)
app.command(help=export.HELP)(export.export)


@app.command()
def profile(
    model: str = typer.Argument("shapes-flow", metavar="[MODEL]", help="Bundled name, folder or hub id."),
    verifier: str = typer.Option("clip", "--verifier", "-v", metavar="NAME", help="Whose rewards."),
    prompts: str = typer.Option("prompts-tuning", metavar="LIST", help="Bundled list or file; see imgscale bench."),
    categories: list[str] = typer.Option([], metavar="NAME", help="Of the prompts, repeatable, or a,b; all of them."),
    limit: str = typer.Option("24", metavar="N", help="How many prompts of it."),
    starts: str = typer.Option("12", metavar="N", help="Starting noises per prompt."),
    draws: str = typer.Option("6", metavar="N", help="Draws at each transition, from each of two of them."),
    seed: str = typer.Option("0", metavar="N", help="Of the first prompt; the others count on."),
    device: str | None = _DEVICE,
    save: bool = typer.Option(True, "--save/--no-save", metavar=_FLAG, help="Keep it with the model."),
    as_json: bool = _JSON,
    quiet: bool = _QUIET,
) -> None:
    """Measure where a model's draws matter, for searches.

    For each step of a sample: how well the preview's score predicts the finished image's (foresight), and how much
    images differ that part ways there (spread). rbf spends its budget by it.
    """

    def work() -> int:
        from imgscale.app import profile

        return profile.profile(
            model,
            verifier,
            prompts,
            categories=[name.strip() for text in categories for name in text.split(",")],
            limit=limit,
            starts=starts,
            draws=draws,
            seed=seed,
            device=device,
            save=save,
            as_json=as_json,
            quiet=quiet,
        )

    _do(work)


@app.command()
def cost(
    model: str = typer.Argument("shapes-flow", metavar="[MODEL]", help="Bundled name, folder, or hub id in the cache."),
    height: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    width: str | None = typer.Option(None, metavar="PIXELS", help="The model's default."),
    steps: str | None = typer.Option(None, metavar="INT", help="Steps of an ordinary sample; the model's default."),
    guidance: str | None = typer.Option(None, metavar="SCALE", help="Guidance scale; the model's default."),
    budget: str = typer.Option("200", "--budget", "-b", metavar="NFE", help="Model evaluations of the searches."),
    verifier: str | None = typer.Option(
        None, "--verifier", "-v", metavar="NAME", help="What scores, or none; clip where it is here."
    ),
    preview: str | None = typer.Option(
        None, metavar="NAME", help="What decodes previews: full, tiny, linear, a folder or hub id; the model's default."
    ),
    device: str | None = typer.Option(
        None, metavar="NAME", help="cpu, cuda, mps; or a GPU to plan for: A100, H100, H200."
    ),
    dtype: str | None = typer.Option(None, metavar="NAME", help="float32, bfloat16 or float16."),
    as_json: bool = _JSON,
    quiet: bool = _QUIET,
) -> None:
    """Say what a search would cost, before anybody pays.

    Counts parameters, FLOPs and eFLOPs (FLOPs and memory traffic) of every part from the model's configs, without its
    weights, and what best-of-n and rbf do with a budget.
    """
    sizes = {
        "height": checks.whole(height, "--height", 1, 16384),
        "width": checks.whole(width, "--width", 1, 16384),
        "guidance_scale": checks.positive(guidance, "--guidance", zero=True),
    }
    transitions, most = checks.whole(steps, "--steps", 1, 1000), checks.whole(budget, "--budget", 1)

    def work() -> int:
        from imgscale.app import cost

        return cost.cost(
            model,
            verifier=verifier,
            preview=preview,
            device=device,
            dtype=checks.dtype(dtype),
            steps=transitions,
            budget=most or 1,
            sizes=sizes,
            as_json=as_json,
            quiet=quiet,
        )

    _do(work)


@app.command()
def serve(
    verifier: str = typer.Argument(..., metavar="VERIFIER", help="What to serve (imgscale list verifiers)."),
    host: str = typer.Option("127.0.0.1", metavar="NAME", help="Where to listen; 0.0.0.0 lets other machines ask."),
    port: str = typer.Option("8765", metavar="N", help="Where to listen; 0 takes a free port."),
    token: str | None = typer.Option(
        None, metavar="VARIABLE", help="Environment variable with a token that clients must show."
    ),
    limit: str = typer.Option("256", metavar="MB", help="The largest request."),
    device: str | None = _DEVICE,
    quiet: bool = _QUIET,
) -> None:
    """Serve a verifier over HTTP, until Ctrl-C.

    Searches elsewhere use it as --verifier "http(url=http://127.0.0.1:8765/)".
    """
    listen, most = checks.whole(port, "--port", 0, 65535), checks.whole(limit, "--limit", 1, 2**20)

    def work() -> int:
        from imgscale.app import serve

        return serve.serve(
            verifier, host=host, port=listen or 0, device=device, token=token, limit=most or 1, quiet=quiet
        )

    _do(work)


@app.command("list")
def list_(
    kind: str | None = typer.Argument(
        None, metavar="[models|searchers|guides|verifiers]", help="One kind; all by default."
    ),
    as_json: bool = _JSON,
) -> None:
    """List the models, searchers, guides and verifiers."""

    def work() -> int:
        from imgscale.app import listing

        return listing.show(kind, as_json)

    _do(work)


@app.command()
def doctor(as_json: bool = _JSON, quiet: bool = _QUIET) -> None:
    """Say what works on this machine and what is missing.

    The exit status is 0 if a search with the bundled model works.
    """

    def work() -> int:
        from imgscale.app import doctor

        return doctor.doctor(as_json, quiet)

    _do(work)


@app.command()
def cite(
    names: list[str] = typer.Argument(
        None, metavar="[NAME]...", help="Searchers, guides, verifiers or keys; all by default."
    ),
    as_json: bool = _JSON,
) -> None:
    """Print BibTeX for imgscale and the methods it runs."""

    def work() -> int:
        from imgscale.app import cite

        return cite.cite(names or [], as_json)

    _do(work)


def _do(work: Callable[[], int]) -> None:
    try:
        status = work()
    except KeyboardInterrupt:
        complain("stopped before there was an image to keep.")
        status = CANCELLED
    raise typer.Exit(status)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 failed, 2 asked for something that can't be, 130 stopped by Ctrl-C.

    Args:
        arguments: What follows the command's name; those of the process for None.
    """
    debug = os.environ.get("IMGSCALE_DEBUG") == "1"
    if not debug:  # libraries' chatter is for developers
        warnings.simplefilter("ignore")
        for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
            os.environ.setdefault(name, "error")
    given = list(sys.argv[1:] if arguments is None else arguments)
    groups = [[str(group.name)] for group in app.registered_groups]
    if not given or given in groups:
        given.append("--help")
    try:
        status = app(args=given, prog_name="imgscale", standalone_mode=False)
    except UserError as error:
        complain(str(error))
        status = 2
    except _UsageError as error:
        complain(_sentence(error))
        status = 2
    except Exception as error:
        if debug:
            raise
        complain(_unexpected(error))
        status = 1
    sys.exit(status or 0)


def _sentence(error: Any) -> str:
    """A usage error of typer's as one sentence that says what to do."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "imgscale"
    name = type(error).__name__
    message = str(error.format_message()).strip()
    if name == "NoSuchOption":
        known = [option for p in context.command.params for option in p.opts] if context else []
        return str(UnknownName("option", error.option_name, [o for o in known if o.startswith("--")]))
    if name == "MissingParameter":
        return f"The {error.param.name} is missing; give it after {path!r}, in quotes if it has spaces."
    if match := re.match(r"No such command '(.*?)'", message):
        group = context.command if context and context.parent else None
        return str(UnknownName("command", match[1], group.list_commands(context) if group else _commands()))
    if match := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        return f"{match[1]!r} is too much for {path!r}; put a text with spaces in quotes."
    return f"{message.rstrip('.')}; see {path} --help."


def _commands() -> list[str]:
    groups = [str(group.name) for group in app.registered_groups]
    return groups + [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]


def _unexpected(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:299] + "…"
    if isinstance(error, MemoryError) or "out of memory" in text.lower():
        return f"Out of memory ({text}); try a smaller --height and --width, --dtype bfloat16, or a smaller model."
    return f"{type(error).__name__}: {text}. This is a bug: please report it with what IMGSCALE_DEBUG=1 shows."
