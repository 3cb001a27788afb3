"""`python -m benchmarks traces`: public production traces on fleets of three sizes, in virtual time.

* `catalog`, `traces.toml`: the traces, the engines they are played on, and the load per engine
* `read`: the files as workloads; `sessions`: what block hashes say of who shares what
* `statistics`, `data/`: what is kept of a trace; `like`: load with the same statistics, where the file is absent
* `scale`: a slice at another rate; `slos`: the two levels
* `cells`, `run`, `summary`: policies side by side; `calibrate`: how the rates in the data file were found
"""
