"""How far long work is, on standard error: a bar on a terminal, a plain line now and then in a log.

All of the package shows progress through this file, so that a log tells what a terminal does.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

INTERVAL = 15.0  # seconds between two lines of a log

Item = TypeVar("Item")


class Stopwatch:
    """Seconds that the stages of a run take, in order: each begins where the one before ends."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._ended = time.monotonic()

    def end(self, stage: str) -> None:
        """Note that a stage ends now."""
        began, self._ended = self._ended, time.monotonic()
        self.seconds[stage] = round(self._ended - began, 1)


class Progress:
    """Work of `total` units, of which `done` are done when the context begins.

    `what` names it, `unit` its units in the plural. With `tokens` in a unit the speed is told.
    Lines come from `advance` and `update`, so no more often than units are done. A `transient` bar
    is taken off the terminal at the end.
    """

    def __init__(
        self,
        what: str,
        total: float,
        unit: str,
        *,
        tokens: float = 0,
        done: float = 0,
        shown: bool = True,
        transient: bool = False,
    ) -> None:
        self.what, self.total, self.unit, self.tokens = what, total, unit, tokens
        self.first = self.done = done
        self.shown, self.figures = shown, ""
        console = Console(stderr=True)
        terminal = console.is_interactive or console.is_jupyter
        self.bar = _bar(console, transient) if shown and terminal else None

    def __enter__(self) -> "Progress":
        self.began = self.told = time.monotonic()
        if self.bar is not None:
            self.bar.start()
            self.bar.add_task(self.what, total=self.total, figures="")
            self.update(self.done)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif self.shown:
            self._say(self._last(whole=kind is None))

    def advance(self, units: float = 1) -> None:
        """So many units more are done."""
        self.update(self.done + units)

    def update(self, done: float, figures: str = "") -> None:
        """So many units are done in all; `figures` report quality, until others are given."""
        self.done, self.figures = done, figures or self.figures
        now = time.monotonic()
        if self.bar is not None:
            shown = _joined(self._speed(now), self.figures)
            self.bar.update(self.bar.task_ids[0], completed=done, figures=shown)
        elif self.shown and now - self.told >= INTERVAL and done < self.total:
            self.told = now
            self._say(self._line(now))

    def _line(self, now: float) -> str:
        new = self.done - self.first
        wait = (now - self.began) * (self.total - self.done) / new if new > 0 else None
        left = f"{_clock(wait)} left" if wait is not None else ""
        share = f"{self._share()} ({self.done / self.total:.0%})"
        return _joined(share, self._speed(now), left, self.figures)

    def _last(self, *, whole: bool) -> str:
        now = time.monotonic()
        spent = _clock(now - self.began)
        if not whole:
            return f"stopped at {self._share()} after {spent}"
        done = f"{self.done:,.0f} {self.unit} in {spent}"
        return _joined(done, self._speed(now), self.figures)

    def _share(self) -> str:
        return f"{self.done:,.0f} of {self.total:,.0f} {self.unit}"

    def _speed(self, now: float) -> str:
        spent, new = now - self.began, self.done - self.first
        return f"{new * self.tokens / spent:,.0f} tokens/s" if self.tokens and spent > 0 else ""

    def _say(self, text: str) -> None:
        print(f"{self.what}: {text}", file=sys.stderr, flush=True)


def track(
    items: Sequence[Item], what: str, unit: str, *, tokens: float = 0, shown: bool = True
) -> Iterator[Item]:
    """The items one by one, each done when the next is asked for."""
    with Progress(what, len(items), unit, tokens=tokens, shown=shown) as progress:
        for item in items:
            yield item
            progress.advance()


def _bar(console: Console, transient: bool) -> RichProgress:
    figures = TextColumn("{task.fields[figures]}", markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), figures, TimeRemainingColumn())
    return RichProgress(*columns, console=console, transient=transient)


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
