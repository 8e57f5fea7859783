from functools import partial
from urllib.parse import urljoin

import pytest

from mlx_packs.studio.access import Login, page_that_opens
from mlx_packs.studio.app import make_app
from tests.helpers.serving import RunningApp


@pytest.fixture
def home(tmp_path):
    (tmp_path / "packs").mkdir()
    return tmp_path


class Signed(RunningApp):
    """A studio, and the headers of the browser that signed in."""

    def __init__(self, home) -> None:
        self.login = Login()
        self.app = make_app(home, self.login)
        super().__init__(self.app)

    @property
    def link(self) -> str:
        return self.login.link("")

    def sign_in(self) -> dict[str, str]:
        status, headers, _ = self.request("GET", self.link)
        assert status == 200
        return {"Cookie": headers["set-cookie"].partition(";")[0]}


@pytest.fixture
def studio(home):
    with Signed(home) as running:
        yield running


@pytest.fixture
def signed_in(new_page, tmp_path):
    """Open the page of a studio by a file as packs studio writes it."""

    def go(running, **options: object):
        page = new_page(**options)
        url = f"http://127.0.0.1:{running.port}/"
        file = tmp_path / "open.html"
        file.write_text(page_that_opens(urljoin(url, running.link)))
        page.goto(file.as_uri())
        page.wait_for_url(url)
        return page

    return go


@pytest.fixture
def opened(signed_in, studio):
    return partial(signed_in, studio)
