"""One device and a line before it: who comes first is served first, and whoever leaves frees it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from imgscale.budget import Ledger
from imgscale.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

    from imgscale.app.job import Job
    from imgscale.result import Candidate, SearchOutput

PATIENCE = 45.0  # seconds that a search goes on though nobody asks how it is: a page asks several times a second
State = Literal["waiting", "loading", "searching", "done", "left", "failed"]


@dataclass(frozen=True)
class Point:
    """The best score when it changed; ``report`` holds those of the verifiers that never steer, where known."""

    nfe: int
    score: float
    report: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """How a search is, for whoever looks.

    Args:
        number: Rises with every change.
        state: "done" has an output, also where the search was stopped; "left" was stopped before there was an image.
        ahead: Searches before this one in the line.
        nfe: Model evaluations spent.
        total: What may be spent.
        seconds: Since the search itself began.
        preview: The best so far, or the most promising x0.
        gallery: The best finished candidates so far, best first.
        trace: One point for each new best.
        ledger: What was spent.
        output: At the end.
        chosen: What a bandit chose, in a line.
        job: The search itself where a bandit chose it, once it is over.
        files: What was written at the end, as `imgscale.app.outputs.save` names it.
        said: Why it failed; or, after a re-run, how the picture compares with the one given.
    """

    number: int = 0
    state: State = "waiting"
    ahead: int = 0
    nfe: int = 0
    total: int | None = None
    seconds: float = 0.0
    preview: Image | None = None
    gallery: tuple[Candidate, ...] = ()
    trace: tuple[Point, ...] = ()
    ledger: Ledger = field(default_factory=Ledger)
    output: SearchOutput | None = None
    chosen: str = ""
    job: Job | None = None
    files: dict[str, Path] = field(default_factory=dict)
    said: str = ""

    @property
    def over(self) -> bool:
        return self.state in ("done", "left", "failed")


class Ticket:
    """A place in the line, and what its holder can see and do.

    Args:
        desk: Where the line is.
        who: The holder.
        work: Does the search and shows how it is.
    """

    def __init__(self, desk: Desk, who: str, work: Callable[[Ticket], None]) -> None:
        self.who, self.work = who, work
        self.stopped = False
        self._desk = desk
        self._view = View()
        self._change = threading.Condition()
        self._looked = time.monotonic()
        self._wanted = True

    def stop(self) -> None:
        """Asks the search to end with its best so far, or leaves the line."""
        self.stopped = True
        with self._change:
            self._change.notify_all()
        self._desk.drop(self)

    def look(self, since: int = -1, timeout: float = 0.0) -> View:
        """The present view; waits up to ``timeout`` seconds for one with a number above ``since``."""
        ahead = self._desk.ahead(self)
        with self._change:
            self._looked, self._wanted = time.monotonic(), True
            self._change.wait_for(lambda: self._view.number > since, timeout)
            self._looked = time.monotonic()
            return replace(self._view, ahead=ahead)

    def rest(self, seconds: float) -> None:
        """Waits so long, or until the search is over."""
        with self._change:
            self._change.wait_for(lambda: self._view.over, seconds)

    # ------------------------------------------------------------------------------------------ the worker's side

    def show(self, **changes: Any) -> None:
        """Changes the view."""
        with self._change:
            if not self._view.over:
                self._view = replace(self._view, number=self._view.number + 1, **changes)
                self._change.notify_all()

    @property
    def view(self) -> View:
        return self._view

    @property
    def wanted(self) -> bool:
        """Whether somebody looked since this was last asked: pictures are decoded only then."""
        with self._change:
            wanted, self._wanted = self._wanted, False
            return wanted

    @property
    def ending(self) -> bool:
        """Whether the search should end: its holder stopped it, or went away without a word."""
        return self.stopped or time.monotonic() - self._looked > PATIENCE


class Desk:
    """Serves tickets one after the other, in a thread of its own.

    Args:
        most: Tickets in the line, the one being served included.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._line: list[Ticket] = []
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="imgscale-demo", daemon=True)
        self._thread.start()

    def enter(self, who: str, work: Callable[[Ticket], None]) -> Ticket:
        """Joins the end of the line.

        Raises:
            UserError: It is full, or the same person is in it.
        """
        with self._change:
            if any(ticket.who == who and not ticket.stopped for ticket in self._line):
                raise UserError("You have a search here already; stop it, or wait for its end.")
            if len(self._line) >= self._most:
                raise UserError(f"The line is full with {len(self._line)} searches; try again in a minute.")
            ticket = Ticket(self, who, work)
            self._line.append(ticket)
            self._change.notify_all()
            return ticket

    def __len__(self) -> int:
        return len(self._line)

    def ahead(self, ticket: Ticket) -> int:
        """How many are before a ticket."""
        with self._change:
            return self._line.index(ticket) if ticket in self._line else 0

    def drop(self, ticket: Ticket) -> None:
        """Ends a ticket at once whose search hasn't begun: out of the line, or while the model is still loading."""
        with self._change:
            if ticket.view.state == "waiting":
                self._line = [each for each in self._line if each is not ticket]
            if ticket.view.state in ("waiting", "loading"):
                ticket.show(state="left")

    def stop(self, who: str) -> bool:
        """Stops what somebody has in the line; whether there was anything."""
        with self._change:
            mine = [ticket for ticket in self._line if ticket.who == who and not ticket.stopped]
        for ticket in mine:
            ticket.stop()
        return bool(mine)

    def close(self) -> None:
        """Stops everything and waits for the engine step that is running."""
        with self._change:
            self._closed = True
            line = list(self._line)
            self._change.notify_all()
        for ticket in line:
            ticket.stop()
        self._thread.join(timeout=30)

    def _serve(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._line or self._closed)
                if not self._line:
                    return
                ticket = self._line[0]
                ticket.show(state="loading")
            try:
                ticket.work(ticket)
                ticket.show(state="left")  # if it showed no end of its own
            except UserError as error:
                ticket.show(state="failed", said=str(error))
            except Exception as error:  # whatever it is, the next in the line is served
                traceback.print_exc(file=sys.stderr)
                line = " ".join(str(error).split())[:200]
                ticket.show(
                    state="failed",
                    said=f"The search broke off ({type(error).__name__}: {line}); the demo's own log says more.",
                )
            finally:
                with self._change:
                    if ticket in self._line:
                        self._line.remove(ticket)
