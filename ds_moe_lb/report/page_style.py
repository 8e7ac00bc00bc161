"""The CSS of the page: light and dark, wide and narrow."""

from ds_moe_lb.report.style import DARK, DEAD_COLOUR, LIGHT, css_variables

PAGE_STYLE = f"""
:root {{ color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --soft: #59636e;
  --line: #d9dde2; --better: #1a7f37; --worse: #9a6700; --back: #f6f8fa;
  --dead: {DEAD_COLOUR}; {css_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #161b22; --ink: #e6edf3;
  --soft: #9198a1; --line: #3b434d; --better: #3fb950; --worse: #d29922; --back: #0d1117;
  {css_variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 1240px; margin: 0 auto; padding: 24px 16px 64px; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 8px; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.15rem; margin: 0 0 12px; }}
h3 {{ font-size: 1rem; margin: 18px 0 8px; overflow-wrap: anywhere; }}
h2 + h3 {{ margin-top: 0; }}
p {{ margin: 0 0 12px; }} .soft {{ color: var(--soft); font-size: .9rem; }}
section {{ background: var(--paper); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px; margin-top: 18px; }}
section > :last-child {{ margin-bottom: 0; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; max-width: 940px; font-size: .92rem; }}
.facts {{ max-width: none; }}
th, td {{ padding: 6px 10px; border-bottom: 1px solid var(--line); text-align: right;
  font-variant-numeric: tabular-nums; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; white-space: normal; min-width: 11em; }}
tr:last-child td {{ border-bottom: 0; }} th {{ color: var(--soft); font-weight: 600; }}
.better {{ color: var(--better); font-weight: 600; }}
.worse {{ color: var(--worse); font-weight: 600; }}
td small {{ display: block; color: var(--soft); font-size: .8em; }}
td small.better, td small.worse {{ font-weight: 400; }}
td small.better {{ color: var(--better); }} td small.worse {{ color: var(--worse); }}
.grid {{ display: grid; gap: 14px 18px; }}
.runs {{ grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); }}
.charts {{ grid-template-columns: repeat(auto-fill, minmax(min(100%, 350px), 1fr)); }}
.layers {{ grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }}
.experts {{ grid-template-columns: repeat(auto-fill, minmax(min(100%, 250px), 1fr)); }}
.runs > div {{ border-left: 4px solid var(--run); padding-left: 12px; }}
ul {{ list-style: none; margin: 0; padding: 0; font-size: .95rem; }}
li {{ padding: 3px 0 3px 1.5em; position: relative; }}
li::before {{ position: absolute; left: 0; content: "\\00b7"; color: var(--soft); }}
li.fine::before {{ content: "\\2713"; color: var(--better); }}
li.look::before {{ content: "\\25b2"; color: var(--worse); font-size: .85em; top: .35em; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 18px; margin-bottom: 10px;
  font-size: .9rem; }}
.legend span::before {{ content: ""; display: inline-block; width: 1.4em; height: .25em;
  margin-right: .5em; vertical-align: middle; background: var(--run); }}
svg {{ display: block; width: 100%; height: auto;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
svg text {{ font-family: inherit !important; }}
.wide svg {{ min-width: 640px; }}
figure {{ margin: 0; }} figcaption {{ font-size: .88rem; margin-bottom: 2px;
  overflow-wrap: anywhere; }}
.experts img {{ display: block; width: 100%; image-rendering: pixelated; }}
.ramp {{ display: inline-block; width: 7em; height: .7em; margin: 0 .4em; }}
.dead {{ display: inline-block; width: .7em; height: .7em; background: var(--dead); }}
.scroll + p, .grid + p {{ margin-top: 12px; }}
details {{ margin-top: 12px; }} summary {{ cursor: pointer; }}
.facts td {{ white-space: normal; text-align: left; vertical-align: top; min-width: 15em;
  overflow-wrap: anywhere; }}
.facts td:first-child {{ min-width: 8em; color: var(--soft); }}
@media (max-width: 600px) {{
  section {{ padding: 14px 12px; }} table {{ font-size: .8rem; }} th, td {{ padding: 5px 4px; }}
  th {{ white-space: normal; overflow-wrap: anywhere; min-width: 4em; }}
  th.whole {{ overflow-wrap: normal; }}
  th:first-child, td:first-child {{ min-width: 7em; }} .facts td {{ min-width: 12em; }}
}}
"""
