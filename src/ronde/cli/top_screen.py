"""The live screen of ``ronde top``, the only module that imports textual."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import Footer, Static

from ronde.errors import RondeError
from ronde.monitor.view import WatchedJob
from ronde.render.top import (
    SHARE_LETTERS,
    draw_over,
    draw_shares,
    draw_summary,
    draw_tables,
)

_COLOURS = {
    "compute": "#5faf5f",
    "communication": "#5f87d7",
    "waiting": "#d75f5f",
    "input": "#d7af5f",
    "other": "#949494",
}
_STYLES = (
    (r"(?m)^ *(rank|host|GPU) .*$", "bold"),
    (r"(?m)^The ranks to look at first:$", "bold yellow"),
    (r"(?s)^The job hangs.*?\n\n", "bold red"),
    (r"silent|no answer|\+[1-9]\d+%|killed by \w+|exit code [1-9]\d*", "red"),
)


class Tables(VerticalScroll):
    """The part of the screen that scrolls."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "scroll_up", "scroll", key_display="↑↓")
    ]


class JobScreen(App[None]):
    """Shows views of a job as they come; the keys are in the last line."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { width: 100%; height: auto; }
    #summary { text-style: bold; }
    #shares, Tables { margin-top: 1; }
    #over { text-style: bold reverse; }
    Tables { scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", key_display="q", priority=True),
        Binding("w", "why", "why?"),
    ]

    class News(Message):
        """A new view, the answer to ``w``, or a sentence on the end of the job."""

        def __init__(self, news: WatchedJob | str, *, is_over: bool = False) -> None:
            super().__init__()
            self.news, self.is_over = news, is_over

    def __init__(self, views: Iterable[WatchedJob], explain: Callable[[], str]) -> None:
        super().__init__()
        self._views, self._explain = views, explain
        self._why = self.over = ""
        self.view: WatchedJob | None = None

    def compose(self) -> ComposeResult:
        for name in ("summary", "shares", "over"):
            yield Static(id=name)
        with Tables():
            yield Static(id="tables")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(Tables).focus()
        for number in (signal.SIGTERM, signal.SIGHUP):
            # Else the terminal would keep the screen's settings.
            asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._start(self._follow)

    def action_why(self) -> None:
        if self._why:
            self._why = ""
        else:
            self._why = "Asking the hosts of the job ..."
            self._start(self._ask)
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    @on(News)
    def _take(self, message: News) -> None:
        if isinstance(message.news, WatchedJob):
            self.view = message.news
        elif message.is_over:
            self.over = message.news or draw_over(self.view)
        elif self._why:
            self._why = message.news
        self._draw()

    def _draw(self) -> None:
        width = max(20, self.size.width - 1)  # without the scrollbar
        texts = {"over": Text(self.over), "tables": Text(self._why)}
        if self.view is not None:
            texts["summary"] = Text(draw_summary(self.view, width))
            texts["shares"] = Text(draw_shares(self.view, width))
            for name, letter in SHARE_LETTERS.items():
                style = f"black on {_COLOURS[name]}"
                texts["shares"].highlight_regex(rf"{letter}+(?=[CMWIO \n])", style)
            if not self._why:
                tables = draw_tables(self.view, width, is_complete=True)
                texts["tables"] = Text(tables)
        for pattern, style in _STYLES:
            texts["tables"].highlight_regex(pattern, style)
        for name, text in texts.items():
            text.rstrip()
            self.query_one(f"#{name}", Static).update(text)
        self.query_one("#over").display = bool(self.over)

    def _start(self, task: Callable[[], None]) -> None:
        # Not textual's own workers: quitting would wait for their threads.
        threading.Thread(target=task, daemon=True).start()

    def _follow(self) -> None:
        problem = ""
        with suppress(RuntimeError):  # the screen has closed
            try:
                for view in self._views:
                    self.post_message(self.News(view))
            except RondeError as error:
                problem = f"ronde top has ended: {error}"
            self.post_message(self.News(problem, is_over=True))

    def _ask(self) -> None:
        try:
            text = self._explain()
        except (OSError, RondeError) as error:
            text = f"The job ended or does not answer: {error}."
        with suppress(RuntimeError):  # as above
            self.post_message(self.News(text))
