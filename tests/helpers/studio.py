"""`packs studio` as a process of its own, and a browser of it."""

import http.client
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


class Browser:
    """A browser that signed in by the link in a line; it has none yet if ``signs_in`` is False."""

    def __init__(self, line: str, signs_in: bool = True) -> None:
        self.link = line.split()[1]
        link = urllib.parse.urlsplit(self.link)
        self.port = link.port
        self.cookie = {}
        if signs_in:
            _, headers, self.first_page = self.request("GET", f"{link.path}?{link.query}")
            self.cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}

    def request(
        self, method: str, path: str, body: object = None, **form: str
    ) -> tuple[int, dict, str]:
        """Return status, headers and text of an answer to a form, or to another body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {**self.cookie, "Origin": f"http://127.0.0.1:{self.port}"}
        if body is None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            body = urllib.parse.urlencode(form)
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.getheaders()), text


class Process(Browser):
    """A `packs studio`, and the browser that signed in; ``limit`` runs in the process first."""

    def __init__(
        self,
        home: Path,
        environment: Mapping[str, str] | None = None,
        limit: Callable[[], object] | None = None,
        signs_in: bool = True,
    ) -> None:
        command = [sys.executable, "-m", "mlx_packs", "studio", "--port", "0", "--no-browser"]
        started = {"stdout": subprocess.PIPE, "text": True, "env": environment}
        self.process = subprocess.Popen(command, cwd=home, preexec_fn=limit, **started)
        self.process.stdout.readline()
        super().__init__(self.process.stdout.readline(), signs_in)

    def status(self, name: str) -> int:
        """Return a number of the process's status in /proc: kB, for VmRSS and VmHWM."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@contextmanager
def studio(home: Path, *arguments: object, **options: object) -> Iterator[Process]:
    """Yield a studio that is killed on leaving."""
    running = Process(home, *arguments, **options)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running.process.stdout.close()
