// What clients get: goodput, demand and attainment, now and over the last minutes.

import { Chart, axis, horizontals, line, overTime, verticals } from "./charts.js";
import { $, fill, keyed, row, say, show } from "./dom.js";
import { NOTHING, clock, count, percent, planText, rate, seconds } from "./format.js";

const PAINTS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const DASHES = [[], [6, 3], [2, 3]];

const rates = (values) => values.filter((value) => value !== null);
const lowest = (values) => Math.min(...rates(values));
const highest = (values) => Math.max(...rates(values));

export class Goodput {
  constructor() {
    this.live = null;
    const named = verticals(() => this.live.plans.map((plan) => ({ at: plan.at_s, label: `v${plan.version}` })));
    const marks = verticals(() => this.live.plans.map((plan) => ({ at: plan.at_s })));
    const targets = horizontals(() => this.targets());
    this.goodput = new Chart($("#goodput-chart"), 230, () => this.ratesChart(named));
    this.attainment = new Chart($("#attainment-chart"), 160, (names) => this.sharesChart(names, marks, targets));
  }

  /** The answer of `/v1/live`. */
  update(live) {
    this.live = live;
    this.figures(live);
    this.classes(live.classes);
    this.charts(live);
    say($("#goodput-empty"), live.why_empty ?? "");
    show($("#goodput-empty"), live.why_empty !== null);
  }

  figures({ recent, inflight, classes }) {
    say($("#now-goodput"), rate(recent.goodput_rps));
    say($("#now-offered"), rate(recent.offered_rps));
    say($("#now-attainment"), percent(recent.attainment));
    say($("#now-inflight"), count(inflight));
    const busy = classes.filter((each) => each.recent.attainment !== null);
    const met = busy.filter((each) => each.recent.attainment >= each.slo.attainment);
    say($("#now-targets"), busy.length ? `${met.length} of ${busy.length}` : NOTHING);
    $("#now-targets").dataset.state = met.length < busy.length ? "bad" : "";
  }

  classes(classes) {
    const make = () => row("", "", "", "number", "number", "number", "number", "number", "number");
    keyed($("#classes tbody"), classes, (each) => each.name, make, (element, { name, slo, recent }) => {
      const { ttft_s, tpot_s } = recent;
      const bound = (value, limit_ms) => `${seconds(value)} (${seconds(limit_ms / 1000)})`;
      fill(
        element,
        name,
        `${percent(recent.attainment)} of ${count(recent.finished)}`,
        `${percent(slo.attainment)} ${verdict(recent, slo)}`,
        rate(recent.goodput_rps),
        rate(recent.offered_rps),
        seconds(ttft_s?.p50),
        bound(ttft_s?.p95, slo.ttft_ms),
        seconds(tpot_s?.p50),
        bound(tpot_s?.p95, slo.tpot_ms),
      );
      element.dataset.state = verdict(recent, slo) === "missed" ? "bad" : "";
    });
  }

  charts(live) {
    const at_s = live.series.goodput_rps.map((_, index) => live.begin_s + (index + 0.5) * live.bucket_s);
    const { goodput_rps, offered_rps } = live.series;
    this.goodput.show([at_s, offered_rps, goodput_rps], ["rates"], ratesSentence(live));
    const shares = live.classes.map((each) => each.series.attainment);
    const names = live.classes.map((each) => each.name);
    this.attainment.show([at_s, ...shares], names, sharesSentence(live));
  }

  ratesChart(marks) {
    const options = overTime();
    options.series.push(line("Offered", "--offered", rate, { width: 1.5, dash: [6, 3] }), line("Goodput", "--good", rate));
    options.axes.push(axis({ size: 44 }));
    options.scales.y = { range: (_, low, high) => [0, Math.max(1, 1.1 * high)] };
    return { ...options, hooks: { drawAxes: [marks] } };
  }

  sharesChart(names, marks, targets) {
    const options = overTime();
    const look = (index) => ({ dash: DASHES[Math.floor(index / PAINTS.length) % DASHES.length], spanGaps: true });
    names.forEach((name, index) =>
      options.series.push(line(name, PAINTS[index % PAINTS.length], percent, look(index))),
    );
    options.axes.push(axis({ size: 44, values: (_, ticks) => ticks.map((tick) => `${Math.round(100 * tick)} %`) }));
    options.scales.y = { range: (_, low) => [this.floor(low), 1.02] };
    return { ...options, hooks: { drawAxes: [marks, targets] } };
  }

  /** Where the axis begins: below everything that is drawn, on a whole tenth. */
  floor(low) {
    const least = Math.min(low ?? 1, ...this.targets().map((target) => target.at));
    return Math.max(0, Math.floor(10 * (least - 0.02)) / 10);
  }

  targets() {
    const shares = [...new Set(this.live.classes.map((each) => each.slo.attainment))].sort((one, other) => other - one);
    return shares.map((at) => ({ at, label: `target ${percent(at)}` }));
  }
}

function verdict(recent, slo) {
  if (recent.attainment === null) return "";
  return recent.attainment >= slo.attainment ? "met" : "missed";
}

function ratesSentence({ recent, series, plans, begin_s }) {
  if (!rates(series.goodput_rps).length) return "Goodput is not known yet.";
  const changes = plans.filter((plan) => plan.at_s > begin_s);
  const said = changes.map((plan) => `${clock(plan.at_s)} ${planText(plan.pattern, plan.offload_ratio)}`);
  return (
    `Goodput: ${rate(recent.goodput_rps)} of ${rate(recent.offered_rps)} offered; over the time shown from ` +
    `${rate(lowest(series.goodput_rps))} to ${rate(highest(series.goodput_rps))}. ` +
    `Plan changes: ${said.join("; ") || "none"}.`
  );
}

function sharesSentence({ classes }) {
  const said = classes.map(({ name, slo, recent }) => `${name} ${percent(recent.attainment)}, target ${percent(slo.attainment)}`);
  return `Attainment by class: ${said.join("; ")}.`;
}
