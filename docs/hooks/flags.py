"""Keep flags on one line: browsers may otherwise break them after a hyphen."""

import re

_FLAG = re.compile(r"<code>(--?[\w-]{1,28}( [\w-]{1,12})?)</code>")


def on_page_content(html: str, **_) -> str:
    return _FLAG.sub(r'<code class="flag">\1</code>', html)
