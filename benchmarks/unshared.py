"""Requests that share nothing with each other, as a workload."""

import numpy as np

from tuner.slo import DEFAULT_CLASS
from tuner.workload import Floats, Ints, Workload


def unshared(span_s: float, arrived_s: Floats, prompt_tokens: Ints, output_tokens: Ints) -> Workload:
    """Columns in order of arrival; all of class `default`, each a session of its own."""
    zeros = np.zeros(len(arrived_s), dtype=np.int64)
    return Workload(
        span_s=span_s,
        classes=(DEFAULT_CLASS,),
        arrived_s=arrived_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        slo_class=zeros,
        session=np.arange(len(arrived_s)),
        root=zeros,
        root_tokens=zeros,
    )
