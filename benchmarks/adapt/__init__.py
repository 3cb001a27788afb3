"""`python -m benchmarks adapt`: traffic that moves, and what each way to orchestrate a fleet makes of it.

* `scenarios`: the data files in benchmarks/scenarios; `generate`: arrivals from them
* `statics`: the grid of fixed plans; `world`: one policy's run in the reference simulator; `policies`: who decides
* `shifts`: how soon a policy is back near the oracle; `jobs`, `run`, `summary`: all of it side by side
* `calibrate`: how the rates in the data files were found; `live`: the same over real processes
"""
