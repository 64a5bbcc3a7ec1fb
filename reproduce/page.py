"""A page of sections, tables, figures and verdicts, and how figures look."""

from __future__ import annotations

import html
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

plt.rcParams.update({"svg.fonttype": "none", "font.size": 11, "axes.grid": True, "grid.color": "#e4e4e4",
                     "axes.axisbelow": True, "legend.fontsize": 9.5})


@dataclass
class Page:
    """The page, part by part; written out after each, so that an interrupted run leaves what it has."""

    out: Path
    title: str
    parts: list[str] = field(default_factory=list)
    verdicts: list[tuple[bool | None, str]] = field(default_factory=list)

    def section(self, name: str, words: str = "") -> None:
        print(f"== {name}", file=sys.stderr, flush=True)
        self.parts.append(f"<h2>{html.escape(name)}</h2>" + (f"<p>{words}</p>" if words else ""))

    def table(self, head: list[str], rows: list[list[str]]) -> None:
        cells = lambda row, tag: "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)
        body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
        self.parts.append(f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>{body}</tbody></table>")

    def figure(self, name: str, caption: str, figure=None) -> None:
        path = self.out / f"{name}.svg"
        if figure is not None:
            figure.savefig(path, bbox_inches="tight")
            plt.close(figure)
        svg = path.read_text(encoding="utf8")
        svg = svg[svg.index("<svg"):]
        self.parts.append(f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>")

    def verdict(self, holds: bool | None, words: str) -> None:
        """`None`: the level is too small to say."""
        mark = {True: "holds", False: "does not hold", None: "open"}[holds]
        self.verdicts.append((holds, words))
        self.parts.append(f"<p class={'open' if holds is None else 'yes' if holds else 'no'}>"
                          f"<b>{mark}</b>: {html.escape(words)}</p>")
        print(f"   {mark}: {words}", file=sys.stderr, flush=True)
        self.write()

    def note(self, words: str) -> None:
        self.parts.append(f"<p class=note>{html.escape(words)}</p>")

    def write(self) -> None:
        held = sum(holds is True for holds, _ in self.verdicts)
        judged = sum(holds is not None for holds, _ in self.verdicts)
        text = (f"<!doctype html><html lang=en><head><meta charset=utf-8>"
                f'<meta name=viewport content="width=device-width,initial-scale=1"><title>{self.title}</title>'
                f"<style>{STYLE}</style></head><body><h1>{self.title}</h1><p>{held} of {judged} claims that could be "
                f"judged hold in this run.</p>{''.join(self.parts)}</body></html>\n")
        (self.out / "index.html").write_text(text, encoding="utf8")


# Figures are drawn for white and keep it in the dark; on a phone they scroll rather than shrink beyond reading.
STYLE = """
:root { color-scheme: light dark; --ink: #1e1e1e; --paper: #fff; --soft: #595959; --line: #ddd; --yes: #00714f; --no: #b33 }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --paper: #14171a; --soft: #a9aeb4; --line: #353a40; --yes: #3ecf9a; --no: #ff8a80 }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word }
h1 { line-height: 1.2 }
table { border-collapse: collapse; margin: 1rem 0; font-size: .9rem; display: block; overflow-x: auto; white-space: nowrap }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child { text-align: left }
figure { margin: 1rem 0; overflow-x: auto }
figure svg { max-width: 100%; min-width: min(34rem, 100%); height: auto; background: #fff; border-radius: 4px }
@media (max-width: 40rem) { figure svg { max-width: none; width: 34rem } }
figcaption, .note { color: var(--soft); font-size: .92rem }
figcaption { position: sticky; left: 0 }
.yes b { color: var(--yes) }
.no b { color: var(--no) }
.open b { color: var(--soft) }
@media print { figure, tr { break-inside: avoid } }
"""
