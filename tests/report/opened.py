# SPDX-License-Identifier: Apache-2.0
"""Pages opened from disk, and whatever goes wrong in them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page

WIDTH, HEIGHT = 1280, 900


class Opened:
    """Opens pages; ``trouble`` has every error, warning, dialog and request but for the page."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self.trouble: list[str] = []

    def __enter__(self) -> Opened:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for context in self._contexts:
            context.close()

    def __call__(self, path: Path, *, width: int = WIDTH, script: bool = True, **more: Any) -> Page:
        context = self._browser.new_context(
            viewport={"width": width, "height": HEIGHT}, java_script_enabled=script, **more
        )
        self._contexts.append(context)
        page = context.new_page()
        address = path.absolute().as_uri()
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("pageerror", lambda error: self._note("error", str(error)))
        page.on("request", lambda request: self._requested(request.url, address))
        page.on("dialog", lambda dialog: (self._note("dialog", dialog.message), dialog.dismiss()))
        page.goto(address)
        if script:
            page.wait_for_selector("html[data-ready=yes]")
        return page

    def _note(self, kind: str, text: str) -> None:
        self.trouble.append(f"{kind}: {text}")

    def _requested(self, url: str, address: str) -> None:
        # A heat map is an image that the page makes itself.
        if url.partition("#")[0] != address and not url.startswith("data:"):
            self._note("request", url)
