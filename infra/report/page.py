"""The HTML page of a report: everything inline, no scripts, and every text escaped."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --faint: #5d6670; --rule: #d8dde3; --card: #f4f6f8;
  --a: #2f6fb3; --b: #c2571a; --c: #2c8a57; --d: #8451a8; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e4e7ea; --faint: #9aa4ae; --rule: #363c43;
  --card: #1e2328; --a: #6aa9e9; --b: #eb9058; --c: #63c08d; --d: #b990dc; } }
body { margin: 2rem auto; padding: 0 1.2rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.kind { color: var(--faint); margin: 0 0 1.2rem; }
.figures { display: flex; flex-wrap: wrap; gap: .7rem; }
.figures > div { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .6rem .9rem; }
.figures b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.figures span, figcaption, .note { color: var(--faint); font-size: .87rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .87rem; }
th, td { padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top;
  overflow-wrap: break-word; } th { color: var(--faint); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 6px; padding: .7rem .9rem;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
figure { margin: 1rem 0; } figcaption { margin-bottom: .4rem; }
figure img { max-width: 100%; background: #fff; border: 1px solid var(--rule); }
svg { width: 100%; height: auto; font-size: 12px; } svg text { fill: var(--ink); }
.bar { fill: var(--a); } .gain { fill: var(--c); } .loss { fill: var(--b); }
.interval { stroke: var(--ink); stroke-width: 1.5; } .grid { stroke: var(--rule); }
.line { fill: none; stroke-width: 2; } .line0 { stroke: var(--a); } .line1 { stroke: var(--b); }
.line2 { stroke: var(--c); } .line3 { stroke: var(--d); }
.dash1 { stroke-dasharray: 7 4; } .dash2 { stroke-dasharray: 2 3; } .dash3 { stroke-dasharray: 9 3 2 3; }
.dot0 { fill: var(--a); } .dot1 { fill: var(--b); } .dot2 { fill: var(--c); } .dot3 { fill: var(--d); }
.band { fill: var(--rule); stroke: var(--rule); stroke-width: 2; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .3rem 0 0; font-size: .87rem; }
.legend svg { width: 24px; height: 8px; }
.limit { stroke: var(--b); stroke-dasharray: 6 4; }
@media print { :root { color-scheme: light; --paper: #fff; --ink: #000; --faint: #444; --rule: #bbb; --card: #fff;
  --a: #2f6fb3; --b: #c2571a; --c: #2c8a57; --d: #8451a8; }
  .wide { overflow: visible; } table { font-size: .75rem; } th, td { padding-right: .5rem; }
  figure, .figures > div, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""No script would run and nothing would be loaded, even if something were not escaped."""


@dataclass
class Page:
    """A report. Everything is plain text but the parts, which are HTML made by its methods and by the charts."""

    kind: str
    name: str
    figures: list[tuple[str, str]] = field(default_factory=list)
    """The headline: a number with its unit, and what it is."""
    parts: list[str] = field(default_factory=list)

    def section(self, title: str) -> None:
        """Begin a section."""
        self.parts.append(f"<h2>{escape(title)}</h2>")

    def text(self, text: str) -> None:
        """Add a note."""
        self.parts.append(f'<p class="note">{escape(text)}</p>')

    def code(self, text: str) -> None:
        """Add text as it is, such as a command."""
        self.parts.append(f"<pre>{escape(text)}</pre>")

    def points(self, lines: Sequence[str]) -> None:
        """Add a list."""
        self.parts.append(f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>")

    def table(self, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table; columns of numbers, which begin with a digit or a sign in every row, are aligned right."""
        numeric = [all(row[n][:1] in "0123456789-+(" for row in rows) for n in range(len(heading or (rows or [()])[0]))]

        def line(tag: str, cells: Sequence[str]) -> str:
            kinds = (' class="number"' if right else "" for right in numeric)
            return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

        head = f"<thead><tr>{line('th', heading)}</tr></thead>" if heading else ""
        body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
        self.parts.append(f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>')

    def picture(self, path: Path, caption: str) -> None:
        """Add a PNG, within the page."""
        data = base64.b64encode(path.read_bytes()).decode()
        image = f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        self.parts.append(f"<figure><figcaption>{escape(caption)}</figcaption>{image}</figure>")

    def html(self) -> str:
        """The whole page."""
        figures = "".join(
            f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in self.figures
        )
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(self.name)}</title>\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
            f'<body><h1>{escape(self.name)}</h1><p class="kind">{escape(self.kind)}</p>\n'
            f'<div class="figures">{figures}</div>\n' + "\n".join(self.parts) + "\n</body></html>\n"
        )
