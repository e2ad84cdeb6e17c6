# SPDX-License-Identifier: Apache-2.0
"""The style sheet of the report: light and dark, on paper and on a narrow screen."""

# Okabe and Ito's palette: distinct for every kind of colour vision.
STYLE = """\
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #667; --paper: #fff; --line: #d9dde3; --bad:
  #b3261e;
  --good: #1b7f4b; --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #cc79a7; --s4: #b8860b; --s5:
  #8a94a3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --dim: #9aa3ae; --paper: #15181c; --line:
  #343a42;
  --bad: #ff897d; --good: #6fd8a3; --s0: #56b4e9; --s1: #ff8c42; --s2: #2fd0a0; --s3: #e6a3c8; --s4:
  #f0c419; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1400px;
  margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap:
  1rem; }
figure { margin: 0; padding: .75rem; border: 1px solid var(--line); border-radius: 8px; break-inside:
  avoid; }
figcaption { font-weight: 600; }
.chart { width: 100%; height: auto; display: block; }
.grid { stroke: var(--line); fill: none; } .ideal { stroke: var(--dim); stroke-dasharray: 2 4; fill: none; }
.limit { stroke: var(--bad); stroke-width: 2; fill: none; } .limit-text { fill: var(--bad); font-size:
  12px; }
.tick { fill: var(--dim); font-size: 12px; } .label { fill: var(--dim); font-size: 12px; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
.line { fill: none; stroke: currentColor; stroke-width: 2; } .dashed { stroke-dasharray: 5 4; }
.bound { fill: none; stroke: currentColor; stroke-width: 1.2; opacity: .75; } .fill { fill: currentColor; }
.s0 { color: var(--s0); } .s1 { color: var(--s1); } .s2 { color: var(--s2); }
.s3 { color: var(--s3); } .s4 { color: var(--s4); } .s5 { color: var(--s5); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; margin: .25rem 0 0;
  padding: 0;
  font-size: 13px; } .key { width: 26px; height: 8px; vertical-align: middle; }
.table { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: 14px; }
th, td { padding: .25rem .55rem; border-bottom: 1px solid var(--line); text-align: right; white-space:
  nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 600; }
.bounds { color: var(--dim); font-size: 12px; } .yes { color: var(--good); } .no, .failed { color:
  var(--bad); }
.failed { white-space: pre-wrap; } .none { color: var(--dim); } dl { display: grid; gap: .2rem 1rem;
  grid-template-columns: max-content 1fr; } dt { color: var(--dim); } dd { margin: 0; overflow-wrap:
  anywhere; }
summary { cursor: pointer; color: var(--dim); } code { font-size: 13px; }
"""
