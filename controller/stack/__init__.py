"""The embedded stack of `trimtab up`: everything on this machine, owned by one process.

* `stack`: its life from start to Ctrl-C; `parts`: what it runs; `checks`: what is refused before anything starts;
  `text`: what the operator is told
* `supervise`: children that are watched and started again; `tether`: children that die with their parent
* `embedded`: a Redis of one's own; `demo_load`: requests to send; `running`: how other commands find a stack

Modules are imported one by one: most commands need only `running`, and need it fast.
"""
