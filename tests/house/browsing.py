"""Chromium, driven by Playwright, for the tests of the site and of JupyterLab;
nothing it loads may come from elsewhere.
"""

import functools
import os
import threading
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lib.workbook.tools import browser as browsers

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-default-browser-check",
    "--no-first-run",
)


def missing(what: str):
    """A tool that the tests need is not there: a failure in CI, a skip at home."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)


@contextmanager
def chromium():
    """A browser, closed at the end."""
    program = browsers.chromium()
    if program is None:
        missing("no Chromium: `apt-get install chromium`")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        missing("no Playwright: `pip install -e .[test]`")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield browser
        browser.close()


def is_foreign(address: str) -> bool:
    """Whether a request leaves this machine."""
    return urlsplit(address).hostname not in (None, "127.0.0.1", "localhost")


def record_faults(page, faults: list[str]) -> None:
    """Append what a page asks of others, fails to get, or complains of."""
    page.on("request", lambda r: faults.append(f"asks another host: {r.url}") if is_foreign(r.url) else None)
    page.on("requestfailed", lambda r: faults.append(f"failed request: {r.url}"))
    page.on("response", lambda r: faults.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
    page.on("pageerror", lambda e: faults.append(f"script error: {e}"))
    page.on("console", lambda m: faults.append(f"console error: {m.text}") if m.type == "error" else None)


@contextmanager
def served(folder: Path):
    """The address of a folder, on a port that is free."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def opener(browser, address: str):
    """A function that opens a page on a telephone, or with other options of a context.

    At the end nothing may have failed, complained, or been asked of another host.
    """
    contexts: list[Any] = []
    faults: list[str] = []

    def open_with(**options):
        contexts.append(browser.new_context(**{"viewport": {"width": 360, "height": 740}, **options}))
        page = contexts[-1].new_page()
        record_faults(page, faults)
        page.goto(address)
        return page

    yield open_with
    for context in contexts:
        context.close()
    assert faults == []
