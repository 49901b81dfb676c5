"""
A browser without a window: keeps its cookies, and sends the token that Django wants with a form.
"""

import json
import urllib.parse
import urllib.request
from typing import Any


class Visitor:
    """An HTTP client of a site. Addresses are relative to the first page."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._jar = urllib.request.HTTPCookieProcessor()
        self._opener = urllib.request.build_opener(self._jar)
        self.get("")

    def get(self, address: str) -> str:
        with self._opener.open(urllib.parse.urljoin(self.url, address), timeout=30) as answer:
            return str(answer.read().decode())

    def get_json(self, address: str) -> Any:
        return json.loads(self.get(address))

    def post(self, address: str, **form: str) -> str:
        token = next(each.value for each in self._jar.cookiejar if each.name == "csrftoken")
        return self.post_without_token(address, **form, csrfmiddlewaretoken=token or "")

    def post_without_token(self, address: str, **form: str) -> str:
        url = urllib.parse.urljoin(self.url, address)
        with self._opener.open(url, urllib.parse.urlencode(form).encode(), timeout=30) as answer:
            return str(answer.read().decode())
