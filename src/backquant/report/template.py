"""Templates of pages."""

from __future__ import annotations

import jinja2


def page_template(*rooms: str) -> jinja2.Template:
    """``page.html.j2`` of the first of ``rooms``; what it includes may stand in any of them.

    >>> page_template("report").name
    'page.html.j2'
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader(f"backquant.{room}", ".") for room in rooms]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")
