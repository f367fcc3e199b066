# SPDX-License-Identifier: Apache-2.0
"""The report's style sheet: light, dark, and on paper. Figures use its variables by name."""

from __future__ import annotations

from offstage.train.memory_by_owner import OWNERS

LIGHT = {
    "ground": "#f7f7f5",
    "panel": "#ffffff",
    "ink": "#1c2127",
    "quiet": "#566070",
    "rule": "#d5dae0",
    "good": "#2e7d4f",
    "warn": "#a85a10",
    "phase-forward": "#e6f1e8",
    "phase-backward": "#ece7f6",
    "phase-step": "#fbeeda",
    "weights": "#5a7690",
    "gradients": "#dc9636",
    "activations": "#4f9d69",
    "state": "#8a5fb0",
    "slots": "#c8503f",
    "window": "#eaa99e",
    "train": "#2f6fb3",
    "eval": "#c4572e",
    "model": "#79838f",
    "fetch": "#2f6fb3",
    "update": "#c4572e",
    "store": "#3f8a55",
    "lower": "#2a8c8c",
    "host": "#8a5fb0",
    "raise": "#a87a1f",
    "collectives": "#a23b72",
    "other": "#9aa0a6",
}
DARK = {
    "ground": "#13161a",
    "panel": "#1a1e24",
    "ink": "#e7eaee",
    "quiet": "#a3adb9",
    "rule": "#353d47",
    "good": "#7cc795",
    "warn": "#f0b062",
    "phase-forward": "#1f2f25",
    "phase-backward": "#282338",
    "phase-step": "#372c1b",
    "weights": "#7d9cb8",
    "gradients": "#e8b062",
    "activations": "#6cba86",
    "state": "#ae8bd3",
    "slots": "#e57a69",
    "window": "#9c4f44",
    "train": "#6fabe6",
    "eval": "#f0905f",
    "model": "#8f9aa7",
    "fetch": "#6fabe6",
    "update": "#f0905f",
    "store": "#76c28a",
    "lower": "#5cc0c0",
    "host": "#ae8bd3",
    "raise": "#dab056",
    "collectives": "#dd7fb0",
    "other": "#7d848c",
}
assert set(LIGHT) == set(DARK) >= set(OWNERS)

_RULES = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 2rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 .35rem; }
h3 { font-size: .95rem; margin: 1rem 0 .3rem; }
p { margin: .3rem 0 .7rem; }
.quiet, figcaption, .missing { color: var(--quiet); }
section { background: var(--panel); border: 1px solid var(--rule); border-radius: .6rem; padding: 1.1rem 1.25rem;
  margin-top: 1.1rem; }
.missing { border-left: 3px solid var(--rule); padding-left: .7rem; margin: .2rem 0; }
.problems { border-left: 3px solid var(--warn); padding-left: .8rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.6rem, 1fr)); gap: .7rem; margin: 1.2rem 0 0;
  padding: 0; }
@media (min-width: 56rem) { .tiles { grid-template-columns: repeat(4, 1fr); } }
.tiles div { background: var(--panel); border: 1px solid var(--rule); border-radius: .6rem; padding: .55rem .8rem; }
.tiles dt { color: var(--quiet); font-size: .8rem; }
.tiles dd { margin: 0; font-size: 1.2rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.headline { display: grid; grid-template-columns: repeat(auto-fit, minmax(14rem, 1fr)); gap: .7rem;
  margin: 1.1rem 0 0; }
.headline div { background: var(--panel); border: 1px solid var(--rule); border-left: 3px solid var(--good);
  border-radius: .6rem; padding: .7rem .95rem; }
.headline div.bad { border-left-color: var(--warn); }
.headline dt { color: var(--quiet); font-size: .87rem; }
.headline dd { margin: 0; color: var(--quiet); font-size: .87rem; }
.headline dt + dd { color: var(--ink); font-size: 1.65rem; line-height: 1.3; font-weight: 600;
  font-variant-numeric: tabular-nums; }
.headline .bad dt + dd { color: var(--warn); }
.advice { border-left: 3px solid var(--rule); padding: .1rem 0 .1rem .9rem; margin-top: .9rem; }
.advice p { margin: .3rem 0; overflow-wrap: anywhere; }
figure { margin: .6rem 0 0; }
figcaption { font-size: .87rem; margin-top: .3rem; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; font-size: 12.5px; }
svg text { fill: var(--ink); font-variant-numeric: tabular-nums; }
svg .label, svg .quiet { fill: var(--quiet); }
svg .grid { stroke: var(--rule); fill: none; }
svg .axis { stroke: var(--quiet); fill: none; }
.plot { position: relative; }
.narrow { display: none; }
.hover { position: absolute; inset: var(--wide, var(--small)); display: flex; }
.hover label { min-width: 0; cursor: crosshair; }
.hover input { position: absolute; left: var(--x); bottom: 0; width: 1px; height: 1px; margin: 0; opacity: 0;
  pointer-events: none; }
.hover span { display: none; position: absolute; pointer-events: none; top: .25rem; left: calc(var(--x) + .6rem);
  z-index: 1; grid-template-columns: auto auto; gap: 0 .7rem; width: max-content; max-width: 21rem;
  padding: .3rem .55rem; background: var(--panel); border: 1px solid var(--quiet); border-radius: .35rem;
  font-size: .8rem; line-height: 1.4; font-variant-numeric: tabular-nums; }
.hover .left span { left: auto; right: calc(100% - var(--x) + .6rem); }
.hover strong { grid-column: 1 / -1; font-weight: 600; overflow-wrap: anywhere; }
.hover em { font-style: normal; }
.hover em::before { content: ""; display: inline-block; width: .7em; height: .7em; border-radius: .15em;
  margin-right: .4em; background: var(--key, transparent); }
.hover b { font-weight: 600; text-align: right; }
.hover label:hover::before, .hover:not(:hover) label:focus-within::before { content: ""; position: absolute;
  left: var(--x); top: 0; bottom: 0; border-left: 1px solid var(--ink); pointer-events: none; }
.hover label:hover span, .hover:not(:hover) input:focus ~ span { display: grid; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(19rem, 100%), 1fr)); gap: 1rem 1.5rem; }
.pair > div { min-width: 0; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.1rem; list-style: none; margin: .4rem 0 .2rem; padding: 0;
  font-size: .87rem; }
.legend i { display: inline-block; width: .85em; height: .85em; border-radius: .15em; margin-right: .4em;
  vertical-align: -.08em; }
.legend i.line { height: 0; border-top: .2em solid; border-radius: 0; vertical-align: .22em; width: 1.3em; }
.legend i.dashed { border-top-style: dashed; border-top-width: .14em; }
.legend b { font-weight: 600; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { font-weight: 500; color: var(--quiet); }
tbody th { width: 15rem; }
.grid tbody th { width: auto; }
.grid th, .grid td { overflow-wrap: normal; }
.runs { flex-direction: column; font-size: 1rem; margin-top: .8rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  main { padding: 1rem .6rem 2rem; }
  section { padding: .8rem .75rem; }
  tbody th { width: 40%; }
  .grid { font-size: .83rem; }
  .grid th.number, .grid td, .grid td.number { padding-right: .45rem; white-space: normal; }
  .wide { display: none; }
  .narrow { display: block; }
  .hover { inset: var(--narrow, var(--small)); }
  .hover span { max-width: 11rem; font-size: .75rem; padding: .25rem .4rem; gap: 0 .5rem; }
}
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; }
pre { margin: .3rem 0 0; padding: .7rem .9rem; background: var(--ground); border: 1px solid var(--rule);
  border-radius: .4rem; overflow-x: auto; font: .8rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }
pre.columns { columns: 19rem; column-gap: 2rem; }
pre.columns span { display: inline-block; width: 100%; margin-bottom: .8em; break-inside: avoid; }
pre.wrap, pre.columns { white-space: pre-wrap; overflow-wrap: anywhere; }
footer { color: var(--quiet); font-size: .85rem; margin-top: 1.4rem; }
@media print {
  @page { margin: 14mm; }
  body { background: none; font-size: 10pt; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  section { border: none; border-top: 1px solid var(--rule); border-radius: 0; padding: .7rem 0 0; margin-top: .9rem; }
  .tiles { grid-template-columns: repeat(4, 1fr); }
  h2, h3, section > p, .legend { break-after: avoid; }
  p { break-inside: avoid; }
  figure, table, .tiles div { break-inside: avoid; }
  pre.columns { columns: 3; }
  .scroll { overflow: visible; }
  .hover { display: none; }
  pre { overflow: visible; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 6.6pt; padding: .5rem;
    background: none; }
}
"""


def css() -> str:
    """The page's style sheet, always light on paper."""
    keys = "\n".join(f".hover .{name} {{ --key: var(--{name}); }}" for name in LIGHT)
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {_variables(DARK)} }} }}"
    return f":root {{ color-scheme: light; {_variables(LIGHT)} }}\n{dark}\n{_RULES}{keys}"


def _variables(colors: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in colors.items())
