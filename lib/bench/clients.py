"""Clients of a server of completions or chats, for loads of many requests at a time."""

import functools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from lib.runs.flags import UsageError


@functools.cache
def certificates() -> Any:
    """Those that the system trusts, which take longer to read than a request."""
    import httpx

    return httpx.create_ssl_context()


def make_client(options: Any) -> Any:
    """An ``httpx.AsyncClient`` of the server."""
    import httpx

    key = os.environ.get("SERVE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base_url = options.url.rstrip("/") + "/"
    return httpx.AsyncClient(base_url=base_url, headers=headers, verify=certificates(), timeout=None)


class Clients:
    """Clients of the server with one open request each, whose connections are used again.

    A client with many connections looks at all of them whenever a request begins or ends.
    """

    def __init__(self, options: Any) -> None:
        self.options, self.idle = options, list[Any]()

    @asynccontextmanager
    async def stream(self, *request: Any, **fields: Any) -> AsyncIterator[Any]:
        """As an ``httpx.AsyncClient``'s."""
        client = self.idle.pop() if self.idle else make_client(self.options)
        try:
            async with client.stream(*request, **fields) as answer:
                yield answer
        finally:
            self.idle.append(client)

    async def close(self) -> None:
        for client in self.idle:
            await client.aclose()


async def find_model(options: Any) -> str:
    """The model that the flags name, or the first that the server lists.

    Raises:
        UsageError: the server lists none.
    """
    import httpx

    async with make_client(options) as client:
        try:
            listed = await client.get("models", timeout=10.0)
            return str(options.model or listed.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise UsageError(f"--url {options.url}: {client.base_url}models does not list a model ({why})") from None
