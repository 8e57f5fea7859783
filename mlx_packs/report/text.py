"""Reports as lines for people: in a terminal as they are, in a notebook as a table."""

from html import escape

_NAME = 8  # columns of the name that begins a line


class TextReport:
    """A report that prints as lines, each with a name of up to 8 columns and a text."""

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        cells = ((line[:_NAME].strip(), line[_NAME:]) for line in self.lines())
        rows = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in cells)
        style = "text-align: left; white-space: pre-wrap"
        return f'<table style="{style}">{"".join(rows)}</table>'
