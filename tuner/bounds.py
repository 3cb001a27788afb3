"""The bounds of many requests at once."""

from collections.abc import Sequence

import numpy as np

from tuner.slo import SloTable
from tuner.workload import Floats, Ints


def bounds_s(slos: SloTable, classes: Sequence[str], slo_class: Ints) -> tuple[Floats, Floats]:
    """TTFT and TPOT bound of each request, seconds; `slo_class` are indices into `classes`."""
    table = [slos.classes[slos.resolve(name)] for name in classes]
    ttft_s = np.array([slo.ttft_ms / 1e3 for slo in table])
    tpot_s = np.array([slo.tpot_ms / 1e3 for slo in table])
    return ttft_s[slo_class], tpot_s[slo_class]
