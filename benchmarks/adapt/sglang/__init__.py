"""The same question on real engines: two SGLang engines, Trimtab beside each static pattern and a peer router.

* `traffic`: two phases for which different patterns are best, and the bounds; `fleet`: two engines that every policy
  finds as new; `run`: policy after policy, seed after seed; `summary`: goodput by phase, goals
"""
