"""The text of a kernel whose template is a .jinja file beside this one: a line that begins with % is Jinja's, all else is the
kernel."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jinja2

from ...language.names import array
from ...writing.kernel_text import KernelText


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fuse.templates", "products"),
        line_statement_prefix="%",
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["array"] = array
    return environment


def render(file: str, gaps: Mapping[str, Any]) -> KernelText:
    """The KernelText of a template. gaps: the values of its gaps by name, among them `arguments`, `bounds`, `launch`, and
    `before` or `counts`."""
    template = _templates().get_template(file)
    blocks = {
        name: "".join(block(template.new_context(dict(gaps)))).rstrip().splitlines() for name, block in template.blocks.items()
    }
    of_launch = {name: gaps[name] for name in ("arguments", "before", "bounds", "counts", "launch") if name in gaps}
    return KernelText(blocks["constants"], blocks["helpers"], blocks["kernel"], **of_launch)
