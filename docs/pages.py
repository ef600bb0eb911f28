"""Pages of the documentation: option tables written from the dataclasses, and hooks of the site (mkdocs.yml).

    python docs/pages.py        write the option tables into docs/*.md

A table stands between `<!-- options: CLASS -->`, or `<!-- options: CLASS STRATEGY -->`, and `<!-- end -->`. Its rows
are the fields of the dataclass, with their defaults and the comments above them; with a strategy also the key of
NeMo's config, and what it is there if nobody sets it. With `beyond CLASS STRATEGY` after it, rows that are the same in
the table of that class are left out.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent


def write_tables() -> None:
    for page in sorted(HERE.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(with_options(text), encoding="utf-8")


def with_options(text: str) -> str:
    """A page with the tables of today's options between its marks."""
    return re.sub(
        r"(<!-- options: (\w+) ?(\w*)(?: beyond (\w+) (\w+))? -->\n).*?<!-- end -->",
        lambda match: f"{match[1]}{table_beyond(*match.groups()[1:])}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def table_beyond(name: str, strategy: str, base: str | None, base_strategy: str | None) -> str:
    """The table of `name`, without the rows that the table of `base` has."""
    header, line, *rows = option_table(name, strategy).split("\n")
    shown = option_table(base, base_strategy or "").split("\n") if base else []
    return "\n".join([header, line, *(row for row in rows if row not in shown)])


def option_table(name: str, strategy: str = "") -> str:
    """The fields of a public options dataclass: name, default, with a strategy NeMo's key and default, meaning."""
    import nemo_gpu_decoding
    from nemo_gpu_decoding.cli.options import field_comments, show_value
    from nemo_gpu_decoding.schema import key_of

    options = getattr(nemo_gpu_decoding, name)
    comments = field_comments(options)
    section = section_of(strategy) if strategy else None
    header = ["field", "default", f"key of `{section.name}`", "default", "meaning"] if section else [
        "option", "default", "meaning"
    ]  # fmt: skip
    rows = [header, ["---"] * len(header)]
    for option in fields(options):
        in_nemo = []
        if section:
            key = key_of(option)
            default = (section.defaults | section.added).get(key, option.default)
            in_nemo = ["-", "-"] if key is None else [f"`{key}`", show_value(default)]
        rows.append([f"`{option.name}`", show_value(option.default), *in_nemo, _cell(comments[option.name])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def section_of(strategy: str) -> Any:
    """What a strategy reads of NeMo's config; needs NeMo."""
    from nemo_gpu_decoding.nemo_plugin import beam_sections, word_graph_sections

    graphs = {"cuda_wfst": word_graph_sections.CUDA_WFST, "paged_biglm": word_graph_sections.PAGED_BIGLM}
    sections = {"flexctc_beam": beam_sections.FLEXCTC, **beam_sections.TRANSDUCERS, **graphs}
    return sections[strategy]


def _cell(comment: str) -> str:
    """A comment as Markdown: values that it explains, two spaces before their meaning, as code."""
    text = re.sub(r" *\b([\w-]+) {2,}", r"<br>`\1`: ", comment)
    return text.replace("|", "\\|").replace("*", "\\*")


# ---------------------------------------------------------------------------------- hooks of the site


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside of docs/ become their paths; the API page gets the docstrings."""
    if page.file.src_path == "api.md":
        names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", markdown, re.M)))
        markdown += "\n## Docstrings\n\n" + "\n\n".join(f"::: nemo_gpu_decoding.{name}" for name in names) + "\n"
    folder = Path(page.file.src_path).parent

    def outside(match: re.Match[str]) -> str:
        target = (HERE / folder / match[2]).resolve()
        if HERE in target.parents:
            return match[0]
        path = target.relative_to(REPOSITORY)
        return f"`{path}`" if match[1].strip("`") == path.name else f"{match[1]} (`{path}`)"

    return re.sub(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]+)\)", outside, markdown)


if __name__ == "__main__":
    write_tables()
