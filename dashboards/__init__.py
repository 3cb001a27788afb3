"""Grafana boards, Prometheus rules and the table of metrics. See README.md."""

EMPTY_UNLESS = "Empty unless "
"""Begins the sentence in a panel's description that says when it has data; the others must have some under any load."""
