"""A real browser for tests (Chromium through Playwright); what a page asked for and complained about is kept."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium browser on the PATH")
SCREENSHOTS = "SERVETWIN_SCREENSHOTS"
"""Environment variable: a folder in which the screenshots of the tests are kept."""
FINDING_THE_SERVER = re.compile(r"/\w+/_stcore/(health|host-config)$")
"""Opened at the address of a page, Streamlit first asks for its server below that address, which is a 404."""
SCREEN = {"width": 1400, "height": 1000}


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless browser without a profile of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield found
        finally:
            found.close()


class Watched:
    """A page of the browser, and what it asked for and complained about since it was opened."""

    def __init__(self, browser: Browser, color_scheme: str = "light") -> None:
        self.page: Page = browser.new_page(color_scheme=color_scheme, viewport=SCREEN)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))
        self.page.on("console", self._said)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not FINDING_THE_SERVER.search(message.location.get("url", "")):
            self.complaints.append(f"console: {message.text} ({message.location.get('url')})")

    @property
    def hosts(self) -> set[str]:
        """Names of the machines that were asked for anything; "" stands for files and data in the page."""
        return {urlparse(url).hostname or "" for url in self.asked}

    def wait_until(self, condition: str, timeout_s: float = 30) -> None:
        """Until a JavaScript expression is true; a page whose policy forbids `eval` can be asked like this, too."""
        deadline = time.monotonic() + timeout_s
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, f"{condition} does not become true; {self.complaints}"
            time.sleep(0.05)

    def screenshot(self, name: str, folder: Path) -> Path:
        """The whole page as a picture in `folder`, or in the folder that the environment names."""
        # A page of Streamlit scrolls within itself.
        height = self.page.evaluate("document.querySelector('[data-testid=stMain]')?.scrollHeight ?? 0")
        self.page.set_viewport_size({**SCREEN, "height": max(SCREEN["height"], height)})
        folder = Path(os.environ.get(SCREENSHOTS, folder))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.png"
        self.page.screenshot(path=path, full_page=True)
        return path


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The dashboard's address while it runs; it has to end well when it is told to."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-c", "from servetwin.sim.cli import main; main()", "dash", *map(str, folders)]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("dashboard: http://127.0.0.1:")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0
