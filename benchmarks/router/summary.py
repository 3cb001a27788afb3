"""From samples to tables and goals."""

import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from benchmarks.machine import versions
from benchmarks.report import Goal, Report, Section, at_most, number
from benchmarks.router.load import Measured
from benchmarks.router.scenarios import SCENARIOS, Scenario
from benchmarks.router.targets import HAPROXY, REFERENCE, TRIMTAB, haproxy_executable

PACKAGES = ("trimtab", "uvloop", "httptools", "sglang-router", "smg", "fastapi", "httpx", "uvicorn")
SATURATED_SHARE = 0.95
BUSY_SHARE = 0.1


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario on one target in one round. CPU is per request, or per chunk for streams; shares are of one core."""

    target: str
    scenario: str
    round: int
    failure: str | None = None
    user_us: float | None = None
    system_us: float | None = None
    proxy_share: float | None = None
    backend_share: float | None = None
    elsewhere_share: float | None = None
    """Used by whatever else ran on the machine: the noise."""
    measured: Measured | None = None

    @classmethod
    def failed(cls, target: str, scenario: str, number: int, why: str) -> "Sample":
        return cls(target=target, scenario=scenario, round=number, failure=why)

    @property
    def cpu_us(self) -> float | None:
        return None if self.user_us is None or self.system_us is None else self.user_us + self.system_us

    @property
    def saturated(self) -> bool:
        """Whether a paced scenario got fewer chunks through than the backend offered."""
        offered = SCENARIOS[self.scenario]
        if self.measured is None or not offered.stream:
            return False
        return self.measured.chunks / self.measured.window_s < SATURATED_SHARE * offered.chunks_per_s


class Samples:
    """All samples of a run, and the medians over its rounds."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples
        self._by_place = {(each.round, each.scenario, each.target): each for each in samples}
        self.targets = list(dict.fromkeys(sample.target for sample in samples))
        self.scenarios = [scenario for name, scenario in SCENARIOS.items() if any(s.scenario == name for s in samples)]

    @property
    def noise(self) -> float | None:
        """Share of a core that everything else on the machine used, median of all samples."""
        return _median(sample.elsewhere_share for sample in self._samples)

    def of(self, target: str, scenario: str) -> list[Sample]:
        return [each for each in self._samples if each.target == target and each.scenario == scenario]

    def value(self, target: str, scenario: str, read: Callable[[Sample], float | None]) -> float | None:
        """The median over the rounds; `None` if no round has a value."""
        return _median(read(sample) for sample in self.of(target, scenario))

    def latency(self, target: str, scenario: str, kind: str, place: int) -> float | None:
        """Median over the rounds of `[p50, p99][place]` of one of `Measured`'s latencies."""

        def read(sample: Sample) -> float | None:
            found = None if sample.measured is None else getattr(sample.measured, kind)
            return None if found is None else float(found[place])

        return self.value(target, scenario, read)

    def ratio(self, target: str, scenario: str, to: str) -> float | None:
        """Median over the rounds of the ratio of CPU, each taken within its round."""
        return _median(self._ratio(sample, to) for sample in self.of(target, scenario))

    def _ratio(self, sample: Sample, to: str) -> float | None:
        other = self._by_place.get((sample.round, sample.scenario, to))
        if other is None or sample.cpu_us is None or not other.cpu_us:
            return None
        return sample.cpu_us / other.cpu_us

    def requests_per_s(self, target: str, scenario: str) -> float | None:
        return self.value(target, scenario, _requests_per_s)


def report(samples: Sequence[Sample], seed: int, machine: Mapping[str, Any], skipped: Mapping[str, str]) -> Report:
    run = Samples(samples)
    more = {} if run.noise is None else {"CPU used by others meanwhile": f"{run.noise:.0%} of a core (median)"}
    return Report(
        benchmark="router",
        seed=seed,
        versions=versions(PACKAGES) | _haproxy_version(),
        machine={**machine, **more},
        results=_results(run),
        goals=goals(run),
        stretch=stretch(run),
        headline=headline(run),
        skipped=skipped,
        sections=[section for section in (_cpu(run), _latency(run), _plain(run)) if section.rows],
    )


def goals(run: Samples) -> list[Goal]:
    """The bounds that the router is built to, against peers in the same run."""
    plain = [("a", "small request"), ("d", "3,000 token ids"), ("t", "12 KB chat")]
    streams = ["c50", "c200", "c500"]
    per_request = [
        at_most(f"CPU per request, {what}, × {REFERENCE}", run.ratio(TRIMTAB, name, REFERENCE), 0.6)
        for name, what in plain
    ]
    per_chunk = [
        at_most(f"CPU per chunk, {name[1:]} streams, × {peer}", run.ratio(TRIMTAB, name, peer), bound)
        for peer, bound in ((REFERENCE, 1.05), (HAPROXY, 1.35))
        for name in streams
    ]
    ttft = run.latency(TRIMTAB, "c200", "added_ttft_ms", 1)
    return [*per_request, *per_chunk, at_most("added TTFT p99, 200 streams, ms", ttft, 1.0)]


def headline(run: Samples) -> list[str]:
    """CPU beside the peers that the goals name, and what the router adds to a stream."""
    pairs = [("a", REFERENCE, "a small request"), ("c200", REFERENCE, "a chunk of 200 streams")]
    pairs.append(("c200", HAPROXY, "a chunk of 200 streams"))
    ratios = [(f"{what} × {peer}", run.ratio(TRIMTAB, name, peer)) for name, peer, what in pairs]
    known = [f"{what} {number(ratio)}" for what, ratio in ratios if ratio is not None]
    found = [f"CPU of the proxy for {', '.join(known)}"] if known else []
    ttft_ms = run.latency(TRIMTAB, "c200", "added_ttft_ms", 1)
    if ttft_ms is not None:
        found.append(f"Adds {number(ttft_ms)} ms to the TTFT of 200 streams at p99")
    return found


def stretch(run: Samples) -> list[Goal]:
    """Beyond the goals; nobody promised these."""
    user_us = run.value(TRIMTAB, "c200", lambda sample: sample.user_us)
    chunk_p99_us = run.latency(TRIMTAB, "c200", "added_chunk_us", 1)
    return [
        at_most(f"CPU per request, small request, × {REFERENCE}", run.ratio(TRIMTAB, "a", REFERENCE), 0.35),
        at_most(f"CPU per request, 3,000 token ids, × {REFERENCE}", run.ratio(TRIMTAB, "d", REFERENCE), 0.3),
        at_most(f"CPU per chunk, 200 streams, × {REFERENCE}", run.ratio(TRIMTAB, "c200", REFERENCE), 0.9),
        at_most("added TTFT p99, 200 streams, ms", run.latency(TRIMTAB, "c200", "added_ttft_ms", 1), 0.5),
        at_most("added chunk p99, 200 streams, µs", chunk_p99_us, 250),
        at_most("user CPU per chunk, 200 streams, µs", user_us, 7),
    ]


def _cpu(run: Samples) -> Section:
    headers = ["stack", *(f"{_short(scenario)} (×) user/system" for scenario in run.scenarios)]
    rows = [[target, *(_cpu_cell(run, target, scenario.name) for scenario in run.scenarios)] for target in run.targets]
    return Section(
        title=f"CPU of the proxy: µs per request or chunk (× {REFERENCE})",
        headers=headers,
        rows=rows,
        notes=[
            "User and system time of all processes of the proxy. Medians over rounds; ratios are taken within a round.",
            "a, d, t: 64 connections in a closed loop. Streams: chunks of about 200 bytes every 10 ms; with 500 "
            "streams every 25 ms, as many a second as with 200, so that the load does not saturate. No TLS.",
            "d goes to `/generate` where `/v1/completions` refuses token ids (sglang-router, smg).",
            *_remarks(run),
        ],
    )


def _cpu_cell(run: Samples, target: str, scenario: str) -> str:
    user_us = run.value(target, scenario, lambda sample: sample.user_us)
    system_us = run.value(target, scenario, lambda sample: sample.system_us)
    total_us = run.value(target, scenario, lambda sample: sample.cpu_us)
    if total_us is None:
        return "–"
    ratio = number(run.ratio(target, scenario, REFERENCE))
    flag = " †" if any(sample.saturated for sample in run.of(target, scenario)) else ""
    return f"{number(total_us)} ({ratio}) {number(user_us)}/{number(system_us)}{flag}"


def _latency(run: Samples) -> Section:
    streams = [scenario for scenario in run.scenarios if scenario.stream]
    headers = ["stack"]
    for scenario in streams:
        headers += [f"{scenario.name} TTFT ms", f"{scenario.name} chunk µs"]
    rows = [[target, *_latency_cells(run, target, streams)] for target in run.targets] if streams else []
    notes = [
        "Added TTFT: first chunk at the client's socket − request sent, less what the backend took from the request's "
        "arrival to sending that chunk. Added chunk: arrival at the client's socket − sending by the backend.",
        "Arrivals are the kernel's, so delays of the load do not count; `direct` is the floor and is not subtracted.",
    ]
    return Section(title="Added latency of streams, p50 / p99", headers=headers, rows=rows, notes=notes)


def _latency_cells(run: Samples, target: str, streams: Sequence[Scenario]) -> list[str]:
    return [
        f"{number(run.latency(target, one.name, kind, 0))} / {number(run.latency(target, one.name, kind, 1))}"
        for one in streams
        for kind in ("added_ttft_ms", "added_chunk_us")
    ]


def _plain(run: Samples) -> Section:
    plain = [scenario for scenario in run.scenarios if not scenario.stream]
    rows = [[target, *(_plain_cell(run, target, scenario.name) for scenario in plain)] for target in run.targets]
    return Section(
        title="Closed loop: requests/s, latency p50 / p99 ms",
        headers=["stack", *(scenario.name for scenario in plain)],
        rows=rows if plain else [],
        notes=["Bounded by load and backend on one core where the proxy is cheap: compare the CPU, not these."],
    )


def _plain_cell(run: Samples, target: str, scenario: str) -> str:
    p50, p99 = (run.latency(target, scenario, "latency_ms", place) for place in (0, 1))
    return f"{number(run.requests_per_s(target, scenario))}, {number(p50)} / {number(p99)}"


def _short(scenario: Scenario) -> str:
    return f"{scenario.name} {scenario.title} µs/{'chunk' if scenario.stream else 'req'}"


def _remarks(run: Samples) -> list[str]:
    """What a reader must know about single cells: failures, errors, saturation."""
    remarks = []
    if (run.noise or 0.0) > BUSY_SHARE:
        remarks.append(
            "The machine was busy with something else: trust ratios of CPU, but neither times nor latencies."
        )
    if any(sample.saturated for target in run.targets for one in run.scenarios for sample in run.of(target, one.name)):
        remarks.append(
            "† the proxy passed on less than 95 % of the chunks offered: it was saturated (or the machine was)."
        )
    for target in run.targets:
        for scenario in run.scenarios:
            remarks += _troubles(target, scenario, run.of(target, scenario.name))
    return remarks


def _troubles(target: str, scenario: Scenario, samples: Sequence[Sample]) -> list[str]:
    failures = {f"{target}, {scenario.name}: failed: {sample.failure}" for sample in samples if sample.failure}
    errors: Counter[str] = Counter()
    for sample in samples:
        errors.update(sample.measured.errors if sample.measured else {})
    return [*sorted(failures), *(f"{target}, {scenario.name}: {count} × {what}" for what, count in errors.items())]


def _results(run: Samples) -> list[dict[str, Any]]:
    return [
        {
            "target": target,
            "scenario": scenario.name,
            "cpu_us": run.value(target, scenario.name, lambda sample: sample.cpu_us),
            "user_us": run.value(target, scenario.name, lambda sample: sample.user_us),
            "system_us": run.value(target, scenario.name, lambda sample: sample.system_us),
            "ratio": run.ratio(target, scenario.name, REFERENCE),
            "added_ttft_ms": [run.latency(target, scenario.name, "added_ttft_ms", place) for place in (0, 1)],
            "added_chunk_us": [run.latency(target, scenario.name, "added_chunk_us", place) for place in (0, 1)],
            "requests_per_s": run.requests_per_s(target, scenario.name),
            "cpu_us_by_round": [sample.cpu_us for sample in run.of(target, scenario.name)],
            "errors": _troubles(target, scenario, run.of(target, scenario.name)),
        }
        for target in run.targets
        for scenario in run.scenarios
    ]


def _haproxy_version() -> dict[str, str]:
    program = haproxy_executable()
    if program is None:
        return {}
    said = subprocess.run([program, "-v"], capture_output=True, text=True, check=False).stdout.split()
    return {HAPROXY: said[2]} if len(said) > 2 else {}


def _requests_per_s(sample: Sample) -> float | None:
    return None if sample.measured is None else sample.measured.requests / sample.measured.window_s


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
