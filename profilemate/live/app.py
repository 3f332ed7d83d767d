# SPDX-License-Identifier: Apache-2.0
"""The terminal view: Textual draws the frame anew after each look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Static

from profilemate.live.snapshots import Snapshot
from profilemate.live.text import HOLDERS_BY, ORDERS, PREFIXES_BY, How, draw
from profilemate.live.watching import View, Watcher

_POLL_SEC = 0.25


class Frame(ScrollView, can_focus=True):
    """Lines of text that can be scrolled. Only those that changed are drawn anew: that is most of
    what watching costs."""

    def __init__(self, resized: Callable[[], None]) -> None:
        super().__init__()
        self._resized = resized
        self.lines: list[Text] = []
        self._strips: list[Strip] = []

    def show(self, lines: list[Text]) -> None:
        """Show these lines."""
        changed = [n for n, line in enumerate(lines) if self.lines[n : n + 1] != [line]]
        gone = range(len(lines), len(self.lines))
        strips, style = self._strips[: len(lines)], self.rich_style
        for number in changed:
            strip = Strip(lines[number].render(self.app.console)).apply_style(style)
            strips[number : number + 1] = [strip]
        self.lines, self._strips = lines, strips
        # No line is wider than the frame. Another width each second would end a scroll under way.
        size = Size(self.size.width, len(strips))
        if size != self.virtual_size:
            is_at_end = 0 < self.max_scroll_y <= self.scroll_target_y
            self.virtual_size = size
            if is_at_end:
                # Who looks at the last lines goes on to see them.
                self.scroll_end(animate=False)
        for number in (*changed, *gone):
            self.refresh_line(number)

    def on_resize(self) -> None:
        """There is more room, or less."""
        self._resized()

    def render_line(self, y: int) -> Strip:
        """A line of the screen."""
        left, top = self.scroll_offset
        known = self._strips[top + y : top + y + 1]
        strip = known[0] if known else Strip.blank(0)
        return strip.crop_extend(left, left + self.size.width, self.rich_style)


class LiveApp(App[None]):
    """Watches the sessions and shows one of them."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Frame { height: 1fr; overflow-x: hidden; scrollbar-gutter: stable; }
    #status { height: 1; color: $text-muted; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", "Quit", show=False, priority=True),
        Binding("p", "pause", "Pause"),
        Binding("n", "next", "Next"),
        Binding("o", "order", "Sort"),
        Binding("h", "holders", "Holders"),
        Binding("f", "prefixes", "Prefixes"),
        Binding("s", "snapshot", "Snapshot"),
    ]

    def __init__(self, sessions: Sequence[Path], interval: float) -> None:
        super().__init__()
        self._watchers = [Watcher(session) for session in sessions]
        self._interval = interval
        self._views: list[View] = []
        self._shown = 0
        self._is_paused = False
        self._order = 0
        self._holders = 0
        self._prefixes = 0
        self._snapshot: Snapshot | None = None
        self._said = ""
        self._status = ""

    def compose(self) -> ComposeResult:
        """The frame, a line of state and the keys."""
        yield Frame(self._draw)
        yield Static("", id="status", markup=False)
        yield Footer()

    async def on_mount(self) -> None:
        """Look at once, and then again and again."""
        self.query_one(Frame).focus()
        self.set_interval(self._interval, self.look)
        await self.look()

    def on_unmount(self) -> None:
        """Let go of the sessions' files."""
        for watcher in self._watchers:
            watcher.close()

    async def look(self) -> None:
        """Look at every session, and show the one that is chosen."""
        # A disk that does not answer must not hold up the keys.
        views = await asyncio.to_thread(lambda: [watcher.view() for watcher in self._watchers])
        if not self._is_paused:
            self._views = views
            self._draw()

    def action_pause(self) -> None:
        """Keep what is shown as it is, or go on."""
        self._is_paused = not self._is_paused
        self._draw_status()

    def action_next(self) -> None:
        """Show the next session."""
        self._shown = (self._shown + 1) % len(self._watchers)
        self._draw()

    def action_order(self) -> None:
        """Sort the engines by another figure."""
        self._order = (self._order + 1) % len(ORDERS)
        self._draw()

    def action_holders(self) -> None:
        """Sort the holders by another figure."""
        self._holders = (self._holders + 1) % len(HOLDERS_BY)
        self._draw()

    def action_prefixes(self) -> None:
        """Sort the hottest prefixes by another figure."""
        self._prefixes = (self._prefixes + 1) % len(PREFIXES_BY)
        self._draw()

    def action_snapshot(self) -> None:
        """Take a snapshot of the session that is shown."""
        if self._snapshot is None:
            self._said = "taking a snapshot"
            self._snapshot = Snapshot(self._watchers[self._shown].session)
            self._polling = self.set_interval(_POLL_SEC, self._poll)
            self._draw_status()

    def _poll(self) -> None:
        result = None if self._snapshot is None else self._snapshot.result()
        if result is not None:
            self._snapshot, self._said = None, result
            self._polling.stop()
            self._draw_status()

    def _draw(self) -> None:
        self._draw_status()
        if not self._views:
            return
        frame = self.query_one(Frame)
        how = How(
            width=max(20, frame.size.width),
            order=list(ORDERS)[self._order],
            holders_by=list(HOLDERS_BY)[self._holders],
            holders=5 if self.size.height < 40 else 10,
            prefixes_by=list(PREFIXES_BY)[self._prefixes],
            prefixes=5 if self.size.height < 40 else 10,
        )
        frame.show(draw(self._views[self._shown], how))

    def _draw_status(self) -> None:
        parts = [
            f"session {self._shown + 1} of {len(self._watchers)}",
            f"engines by {list(ORDERS)[self._order]}",
            f"holders by {list(HOLDERS_BY)[self._holders]}",
            f"prefixes by {list(PREFIXES_BY)[self._prefixes]}",
        ]
        if self._is_paused:
            parts.insert(0, "PAUSED")
        if self._said:
            parts.insert(0, self._said)
        status = "; ".join(parts)
        if status != self._status:
            self._status = status
            # One line stays one line: a new layout would draw the whole screen anew.
            self.query_one("#status", Static).update(Text(status, no_wrap=True), layout=False)
