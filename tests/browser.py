"""
A real browser for the tests of pages: Chromium, without a window, driven through its chromedriver.
"""

from __future__ import annotations

import tempfile
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.wait import WebDriverWait

from tests.servers import finding

#: Seconds that a page may take to become what a test waits for.
PATIENCE = 20


class Browser:
    """One page at a time; ``driver`` is Selenium's, for all that isn't made shorter here."""

    def __init__(self) -> None:
        found = finding.chromium()
        self._profile = tempfile.TemporaryDirectory(prefix="fencedlock-browser-")
        options = ChromeOptions()
        options.binary_location = str(found.path)
        for argument in (
            "--headless=new",
            # Its sandbox needs privileges that a container seldom has; it sees our pages alone.
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
            f"--user-data-dir={self._profile.name}",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(options, ChromeService(str(finding.chromedriver().path)))
        self.reset()

    def reset(self) -> None:
        self.driver.get("about:blank")
        self._cdp("Storage.clearDataForOrigin", origin="*", storageTypes="all")
        self._cdp("Network.clearBrowserCookies")
        self.script(True)
        self.offline(False)
        self.show(width=1280, dark=False)
        self.complaints()

    def show(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._cdp("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", features=[scheme])

    def script(self, allowed: bool) -> None:
        self._cdp("Emulation.setScriptExecutionDisabled", value=not allowed)

    def offline(self, cut: bool) -> None:
        speed = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._cdp("Network.enable")
        self._cdp("Network.emulateNetworkConditions", offline=cut, **speed)

    def get(self, url: str) -> None:
        self.driver.get(url)

    def log_in(self, client: Any, url: str) -> None:
        cookie = client.cookies["sessionid"]
        self._cdp("Network.setCookie", name="sessionid", value=cookie.value, url=url)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Any, message: str = "") -> Any:
        return WebDriverWait(self.driver, PATIENCE, 0.05).until(lambda _: condition(self), message)

    def scrolls_sideways(self) -> bool:
        return self.run("const e = document.documentElement; return e.scrollWidth > e.clientWidth;")

    def complaints(self) -> list[str]:
        log: list[dict[str, Any]] = self.driver.get_log("browser")
        said = [each["message"] for each in log if each["level"] in ("WARNING", "SEVERE")]
        # Every browser asks for one; an admin has none.
        return [message for message in said if "/favicon.ico" not in message]

    def close(self) -> None:
        self.driver.quit()
        self._profile.cleanup()

    def _cdp(self, command: str, **arguments: Any) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)
