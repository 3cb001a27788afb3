"""The reference simulator beside two real SGLang engines that serve the same requests.

* `telemetry`: what the engines reported of a span of time, as a simulated fleet; `run`: pattern after pattern;
  `summary`: errors, tables, goals
"""
