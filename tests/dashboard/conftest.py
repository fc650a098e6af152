"""A stack with two keys, and a browser that looks at it.

A test fails when its page logs an error or sends a request to another host.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from tests.support.examples import BASE_MODEL
from tests.support.left_sockets import allow_left_sockets, close_left_sockets  # noqa: F401 - a fixture
from tests.support.stack import Stack

KEY, OTHER_KEY = "tml-dashboard-mine", "tml-dashboard-other"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CI = "TINSMITH_CI"
"""Set in CI: there a missing browser is a failure."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    allow_left_sockets(items, Path(__file__).parent)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one file only: its event loop counts as running in this thread, where no other can run until it ends."""
    chromium = shutil.which("chromium")
    if chromium is None:
        if os.environ.get(CI):
            pytest.fail(f"chromium is not in PATH, and {CI} is set")
        pytest.skip("chromium is not in PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def stack(browser: Browser, toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """It starts only where there is a browser."""
    flags = ["--api-key", KEY, "--api-key", OTHER_KEY]
    with Stack(tmp_path_factory.mktemp("stack"), base_models=[f"{BASE_MODEL}={toy}"], flags=flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def service(stack: Stack) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(base_url=stack.base_url, api_key=KEY) as service:
        yield service


@dataclass
class Visitor:
    """Opens pages; `problems` is what must not have happened in them."""

    browser: Browser
    base_url: str
    problems: list[str] = field(default_factory=list)
    expected: str = ""
    """A browser's complaint that belongs to the test."""
    _pages: list[Page] = field(default_factory=list)

    def open(self, path: str = "", *, key: str | None = KEY, phone: bool = False, **options: Any) -> Page:
        """A page at #/path. Without a key it is as on the first visit."""
        size = {"width": 390, "height": 780} if phone else {"width": 1280, "height": 900}
        context = self.browser.new_context(viewport=size, is_mobile=phone, has_touch=phone, **options)  # type: ignore[arg-type]
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('tinsmith-key', '{key}')")
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._asked)
        self._pages.append(page)
        page.goto(f"{self.base_url}/#/{path}")
        if key is not None:
            page.wait_for_selector("#live[data-state=good]")
        return page

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not (self.expected and self.expected in message.text):
            self.problems.append(message.text)

    def _asked(self, request: Request) -> None:
        if not request.url.startswith(self.base_url):
            self.problems.append(f"a request to {request.url}")
        if KEY in request.url:
            self.problems.append("the key is in an address")

    def leave(self) -> None:
        for page in self._pages:
            page.context.close()


@pytest.fixture
def visitor(browser: Browser, stack: Stack) -> Iterator[Visitor]:
    visitor = Visitor(browser, stack.base_url)
    yield visitor
    visitor.leave()
    assert visitor.problems == []
