"""The same question over real processes: engines, router, Redis and controller on this machine.

* `load`: sends a workload to a router as its clients would; `stack`: the processes; `run`: policy after policy
"""
