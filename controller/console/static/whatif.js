// What if: predicted goodput over the offload ratio, by simulating the traffic of the last minutes.

import { post, simulate } from "./api.js";
import { Chart, axis, horizontals, line, verticals } from "./charts.js";
import { confirm } from "./dialogs.js";
import { $, fill, h, keyed, row, say, show } from "./dom.js";
import { clock, count, number, percent, planText, rate, ratio, seconds } from "./format.js";
import { pinned, reasonOf } from "./plan.js";

/** The steps of the slider, and the plans that are simulated. */
const RATIOS = Array.from({ length: 19 }, (_, index) => index / 20);

export class WhatIf {
  constructor(changed) {
    this.changed = changed;
    this.answer = null;
    this.form = $("#what-if-form");
    this.slider = $("#ratio");
    this.form.addEventListener("submit", (event) => this.predict(event));
    this.slider.addEventListener("input", () => this.select());
    $("#pin-what-if").addEventListener("click", () => this.pin());
    const asked = verticals(() => [{ at: Number(this.slider.value), label: rate(this.asked().forecast.goodput_rps) }]);
    const now = horizontals(() => [{ at: this.answer.in_force.forecast.goodput_rps, label: "in force" }]);
    this.chart = new Chart($("#what-if-chart"), 200, () => curve(asked, now));
    this.chart.told = () => this.answer.variants.indexOf(this.asked());
  }

  /** So many engines are alive: how many of them may prefill. */
  engines(alive) {
    const select = this.form.elements.prefill_engines;
    const choices = Array.from({ length: Math.max(0, alive - 1) }, (_, index) => String(index + 1));
    const make = (value) => h("option", { value });
    keyed(select, ["", ...choices], (value) => value, make, (option, value) =>
      say(option, value === "" ? "as in force" : `${value} of ${alive}`),
    );
  }

  async predict(event) {
    event.preventDefault();
    const [button, error, state] = [$("button", this.form), $(".error", this.form), $(".empty", this.form)];
    say(error, "");
    show(state, true);
    say(state, `Simulating ${RATIOS.length} plans …`);
    button.disabled = true;
    const prefill = this.form.elements.prefill_engines.value;
    try {
      this.answer = await simulate("what-if", {
        offload_ratios: RATIOS,
        ...(prefill && { prefill_engines: Number(prefill) }),
      });
      say(state, trafficText(this.answer));
      this.draw();
    } catch (problem) {
      say(error, problem.message);
      say(state, this.answer === null ? "Nothing is predicted yet." : "The prediction shown is an earlier one.");
    } finally {
      button.disabled = false;
    }
  }

  draw() {
    show($("#what-if-answer"), true);
    const best = this.answer.variants.reduce((one, other) => (better(other, one) ? other : one));
    this.slider.value = String(best.plan.knobs.offload_ratio);
    this.select();
  }

  select() {
    const { variants, in_force } = this.answer;
    const asked = this.asked();
    const value = ratio(Number(this.slider.value));
    say($("#ratio-value"), value);
    this.slider.ariaValueText = `${value}, predicted goodput ${rate(asked.forecast.goodput_rps)}`;
    say($("#forecast-asked"), planText(asked.plan.pattern, asked.plan.knobs.offload_ratio));
    forecastTable(in_force.forecast, asked.forecast);
    const goodput = variants.map((each) => each.forecast.goodput_rps);
    const most = Math.max(...goodput);
    const sentence =
      `Predicted goodput over offload ratio: highest ${rate(most)} at ${ratio(RATIOS[goodput.indexOf(most)])}, ` +
      `lowest ${rate(Math.min(...goodput))}; the plan in force gives ${rate(in_force.forecast.goodput_rps)}.`;
    this.chart.show([RATIOS, goodput], [this.answer.traffic.until_s], sentence);
  }

  asked() {
    const away = (each) => Math.abs(each.plan.knobs.offload_ratio - Number(this.slider.value));
    return this.answer.variants.reduce((one, other) => (away(other) < away(one) ? other : one));
  }

  async pin() {
    const { plan } = this.asked();
    const what = planText(plan.pattern, plan.knobs.offload_ratio);
    const text = "It comes into force on all routers and mode becomes manual: the tuner leaves it alone.";
    const answer = await confirm({ title: `Pin ${what}?`, text, verb: "Pin", reason: true });
    if (answer === null) return;
    const { reason = `what-if predicted ${rate(this.asked().forecast.goodput_rps)}` } = reasonOf(answer);
    say($(".error", this.form), "");
    try {
      say($("#what-if-done"), pinned(await post("plan/pin", { plan: { ...plan, reason }, reason })));
      await this.changed();
    } catch (problem) {
      say($(".error", this.form), problem.message);
    }
  }
}

/** As the tuner judges: first what misses attainment, then goodput. */
function better({ forecast: one }, { forecast: other }) {
  if (one.shortfall !== other.shortfall) return one.shortfall < other.shortfall;
  return one.weighted_goodput > other.weighted_goodput;
}

function curve(asked, now) {
  return {
    series: [{ label: "Offload ratio", value: (_, value) => ratio(value) }, line("Predicted goodput", "--good", rate, { points: { show: true, size: 5 } })],
    axes: [axis({ size: 26, values: (_, ticks) => ticks.map((tick) => tick.toFixed(1)) }), axis({ size: 44 })],
    scales: { x: { time: false, range: [-0.02, 0.94] }, y: { range: (_, low, high) => [0, Math.max(1, 1.15 * high)] } },
    cursor: { drag: { x: false, y: false } },
    hooks: { drawAxes: [now, asked] },
  };
}

function trafficText({ traffic, engines }) {
  return (
    `Predicted for ${count(traffic.requests)} requests of the ${number(traffic.span_s)} s before ${clock(traffic.until_s)} ` +
    `(${rate(traffic.rate_rps)}, ${count(traffic.mean_prompt_tokens)} tokens in, ${count(traffic.mean_output_tokens)} out, means) ` +
    `on ${engines} engines. Not corrected by measured errors.`
  );
}

function forecastTable(now, asked) {
  const lines = [
    ["Goodput", (each) => rate(each.goodput_rps)],
    ["Offered", (each) => rate(each.offered_rps)],
  ];
  for (const name of Object.keys(asked.classes)) {
    lines.push([`${name}: attainment`, (each) => percent(each.classes[name]?.attainment)]);
    lines.push([`${name}: TTFT p90`, (each) => seconds(each.classes[name]?.ttft_s?.[1])]);
    lines.push([`${name}: TPOT p90`, (each) => seconds(each.classes[name]?.tpot_s?.[1])]);
  }
  for (const role of new Set([...Object.keys(now.utilisation), ...Object.keys(asked.utilisation)])) {
    lines.push([`${role} engines busy`, (each) => percent(each.utilisation[role])]);
  }
  const make = () => row("", "number", "number");
  keyed($("#forecast tbody"), lines, ([name]) => name, make, (element, [name, of]) => fill(element, name, of(now), of(asked)));
}
