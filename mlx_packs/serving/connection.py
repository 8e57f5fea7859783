"""Connections on which headers must arrive in time; uvicorn waits for them without end."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_HEADER_SECONDS = 30.0


class TimedHeaders(AutoHTTPProtocol):  # type: ignore[valid-type, misc]  # one of two classes
    """Closes a connection on which the headers of a request take too long.

    Between requests uvicorn's own time of an idle connection holds, until a byte arrives.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Read data; where they are no whole headers, expect the others."""
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect()
        else:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect(self) -> None:
        if self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
