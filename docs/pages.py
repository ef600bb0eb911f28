"""Pages of the documentation: option tables written from the dataclasses, and hooks of the site (mkdocs.yml).

    python docs/pages.py        write the option tables into docs/*.md

A table stands between `<!-- options: CLASS -->`, or `<!-- options: CLASS STRATEGY -->`, and `<!-- end -->`. Its rows
are the fields of the dataclass, with their defaults and the first sentences of the comments above them; with a
strategy also the key and default of NeMo's config, where they differ. Options without effect share the last row. With
`beyond CLASS STRATEGY` after it, rows that are the same in the table of that class are left out. The site's page of
public names has the complete comments.
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
    """The short table of `name`, without the rows that the table of `base` has."""
    rows = option_rows(name, strategy)
    shown = option_rows(base, base_strategy or "") if base else []
    idle = [option for option, _, meaning in rows if re.search(f"{WITHOUT_EFFECT}|^Ignored", meaning)]
    short = [
        [option, default, _cell(first_sentences(meaning))]
        for option, default, meaning in rows
        if option not in idle and [option, default, meaning] not in shown
    ]
    return table([*short, *([[", ".join(idle), "", f"Keys of NeMo, {WITHOUT_EFFECT}."]] if idle else [])])


WITHOUT_EFFECT = "without effect"  # what comments of options say that NeMo has and this package ignores
MOST_WORDS = 25  # of a meaning, if it has more than one sentence


def first_sentences(comment: str) -> str:
    """A comment without the sentences that make it longer than `MOST_WORDS`; the values that it explains stay."""
    if re.search(r"\b[\w-]+ {2,}", comment):
        return comment
    shown, *others = re.split(r"(?<=\.) (?=[A-Z])", comment)
    for sentence in others:
        if len(f"{shown} {sentence}".split()) > MOST_WORDS:
            break
        shown = f"{shown} {sentence}"
    return shown


def option_table(name: str, strategy: str = "") -> str:
    """All fields of a public options dataclass, with their complete comments."""
    return table([[option, default, _cell(meaning)] for option, default, meaning in option_rows(name, strategy)])


def table(rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (["option", "default", "meaning"], ["---"] * 3, *rows))


def option_rows(name: str, strategy: str) -> list[list[str]]:
    """Name, default and comment of each field; with a strategy also NeMo's key and default, where they differ."""
    import nemo_gpu_decoding
    from nemo_gpu_decoding.cli.options import field_comments, show_value
    from nemo_gpu_decoding.schema import key_of

    options = getattr(nemo_gpu_decoding, name)
    comments = field_comments(options)
    section = section_of(strategy) if strategy else None
    rows = []
    for option in fields(options):
        shown, default = f"`{option.name}`", show_value(option.default)
        if section and (key := key_of(option)) is not None:
            in_nemo = show_value((section.defaults | section.added).get(key, option.default))
            shown += f", `{key}`" * (key != option.name)
            default += f", {in_nemo}" * (in_nemo != default)
        rows.append([shown, default, comments[option.name]])
    return rows


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
    """Links to files outside of docs/ become their paths; the API page gets docstrings and options."""
    if page.file.src_path == "api.md":
        names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", markdown, re.M)))
        markdown += "\n## Docstrings\n"
        for name in names:
            markdown += f"\n::: nemo_gpu_decoding.{name}\n"
            if name.endswith("Config"):
                markdown += f"\n{option_table(name)}\n"
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
