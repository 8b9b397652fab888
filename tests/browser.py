"""A page in a real browser, and everything it said or asked for meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--no-sandbox",  # as root in a container there is none
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def missing() -> str | None:
    """Why there is no browser here, if there is none."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed"
    return None if CHROMIUM else "no chromium on the PATH"


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=CHROMIUM, args=list(QUIET), timeout=240_000)
        yield running
        running.close()


class Visit:
    """One page, opened from a file in a fresh profile."""

    def __init__(
        self,
        browser: Any,
        file: Path,
        *,
        width: int = 1280,
        height: int = 900,
        colours: str = "light",
        touch: bool = False,
        before: str = "",
    ) -> None:
        """``before``: a script that runs ahead of the page's own."""
        self.complaints: list[str] = []  # console errors and warnings, exceptions, requests that failed
        self.requests: list[str] = []
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=colours, has_touch=touch, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.page.add_init_script(before)
        self.page.set_default_timeout(240_000)  # only there to end a hang, on however busy a machine
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(f"failed: {request.url}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_function("() => window.overtone")

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def run(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def close(self) -> None:
        self.context.close()
