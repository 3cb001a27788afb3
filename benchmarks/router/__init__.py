"""The router beside its peers: what a proxied request and a proxied chunk cost, in CPU and in latency.

`backend` answers, `load` asks and measures, `targets` are the proxies in between, `run` puts them together.
"""
