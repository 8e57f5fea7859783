import pytest

from mlx_packs.studio.access import Login, page_that_opens
from mlx_packs.studio.app import make_app
from tests.helpers.browser import launched, watched_pages
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


@pytest.fixture(scope="module")
def browser():
    with launched() as browser:
        yield browser


@pytest.fixture
def expect(browser):
    from playwright.sync_api import expect

    return expect


@pytest.fixture
def opened(browser, studio, tmp_path):
    """Sign in by the file that packs studio opens; nothing may fail, or be asked of others."""
    with watched_pages(browser) as new_page:

        def go(**options: object):
            page = new_page(**options)
            file = tmp_path / "open.html"
            file.write_text(page_that_opens(studio.login.link(studio.url)))
            page.goto(file.as_uri())
            page.wait_for_url(f"{studio.url}/")
            return page

        yield go
