// The plan in force, why it is, who may move it, and what came before.

import { get, post, put } from "./api.js";
import { confirm } from "./dialogs.js";
import { $, fill, h, keyed, pairs, row, say, show } from "./dom.js";
import { ago, candidateText, clock, count, number, percent, planText, rate, ratio } from "./format.js";

export class PlanPanel {
  /** `changed()` is called after the operator changed something, so that the page shows it at once. */
  constructor(changed) {
    this.changed = changed;
    this.plan = null;
    this.mode = null;
    this.modeTouched = false;
    this.form = $("#mode");
    this.form.addEventListener("change", (event) => (this.modeTouched ||= event.target.name === "mode"));
    this.form.addEventListener("submit", (event) => this.setMode(event));
    $("#pin").addEventListener("click", () => this.pinCurrent());
    $("#unpin").addEventListener("click", () => this.unpin());
  }

  /** The answer of `/v1/explain`, and `/v1/plan/history`. */
  update(why, history) {
    this.plan = why.plan;
    this.mode = why.mode;
    this.facts(why.plan);
    this.why(why);
    this.steering(why.mode);
    this.history(history, why.plan);
  }

  facts(plan) {
    say($("#plan-empty"), plan === null ? "No plan has been issued yet." : "");
    show($("#plan-empty"), plan === null);
    show($("#plan-knobs"), plan !== null);
    if (plan === null) return;
    const { knobs } = plan;
    pairs($("#plan-facts"), [
      ["Version", `v${plan.version}`],
      ["Pattern", plan.pattern],
      ["Offload ratio", ratio(knobs.offload_ratio)],
      ["Roles", roles(plan)],
      ["Issued", `${clock(plan.issued_at_s)} (${ago(plan.issued_at_s, Date.now() / 1000)}) by ${plan.issued_by}`],
      ["Reason", plan.reason],
    ]);
    const own = Object.entries(knobs).map(([name, value]) => [name, value === null ? "not set" : String(value)]);
    const used = Object.entries(plan.roles).map(([engine, role]) => [`role of ${engine}`, role]);
    pairs($("#plan-knobs dl"), [...own, ...used]);
  }

  why({ sentences, violations, search }) {
    const items = sentences.map((text, index) => ({ index, text }));
    keyed($("#why"), items, ({ index }) => index, () => h("li"), (element, { text }) => say(element, text));
    this.causes(violations);
    this.candidates(search?.search ?? null);
  }

  causes({ measured, predicted }) {
    const names = [...new Set([...Object.keys(measured), ...Object.keys(predicted)])];
    const make = () => row("", "number", "number");
    keyed($("#causes tbody"), names, (name) => name, make, (element, name) =>
      fill(element, name, count(measured[name] ?? 0), count(predicted[name] ?? 0)),
    );
    show($("#causes"), names.length > 0);
  }

  candidates(search) {
    const place = $("#candidates .scroll");
    show($("#candidates .empty"), search === null);
    if (search === null) return place.replaceChildren();
    if ($("table", place) === null) place.append(candidateTable());
    say($("caption", place), `${search.trials} tried in ${number(search.seconds)} s`);
    const lines = [["In force", search.incumbent], ["Best static", search.best_static]];
    search.ranked.forEach((each, index) => lines.push([`No. ${index + 1}`, each]));
    const make = () => row("", "", "number", "number", "number");
    keyed($("tbody", place), lines, ([name]) => name, make, (element, [name, each]) =>
      fill(element, name, candidateText(each.candidate), rate(each.goodput_rps), gain(each), lowest(each.forecast)),
    );
  }

  steering({ mode, by, reason }) {
    say($("#fact-mode"), mode);
    $("#fact-mode").title = `Set by ${by}: ${reason}`;
    if (!this.modeTouched) this.form.elements.mode.value = mode;
    $("#pin").disabled = this.plan === null;
    $("#unpin").disabled = mode !== "manual";
  }

  history({ plans }, current) {
    const earlier = plans.filter((plan) => plan.version !== current?.version);
    keyed($("#history tbody"), earlier, (plan) => plan.version, (plan) => this.historyRow(plan), () => {});
    show($("#history .empty"), earlier.length === 0);
    show($("#history .scroll"), earlier.length > 0);
  }

  historyRow(plan) {
    const element = row("", "", "", "wide", "");
    const what = planText(plan.pattern, plan.knobs.offload_ratio);
    fill(element, `v${plan.version}`, clock(plan.issued_at_s), what, plan.reason);
    const button = (text, act) => h("button", { type: "button", textContent: text, onclick: act, "aria-label": `${text} plan v${plan.version}` });
    element.cells[4].append(button("Roll back to", () => this.rollBack(plan)), button("Pin", () => this.pinEarlier(plan)));
    return element;
  }

  async setMode(event) {
    event.preventDefault();
    const { mode, reason } = Object.fromEntries(new FormData(this.form));
    await this.act(async () => {
      await put("mode", { mode, ...(reason.trim() && { reason: reason.trim() }) });
      this.form.elements.reason.value = "";
      return `Mode is ${mode} from the next tick on.`;
    });
  }

  async pinCurrent() {
    const text = "It stays in force and mode becomes manual: the tuner leaves it alone until it is unpinned.";
    await this.pin({}, `Pin plan v${this.plan.version}?`, text);
  }

  async pinEarlier({ version }) {
    const text = "Its content comes into force as a new version and mode becomes manual.";
    await this.pin({ version }, `Pin plan v${version}?`, text);
  }

  async pin(what, title, text) {
    const answer = await confirm({ title, text, verb: "Pin", reason: true });
    if (answer === null) return;
    await this.act(async () => pinned(await post("plan/pin", { ...what, ...reasonOf(answer) })));
  }

  async unpin() {
    const text = "The plan stays until the tuner finds a better one; mode becomes auto.";
    const answer = await confirm({ title: "Unpin?", text, verb: "Unpin", reason: true });
    if (answer === null) return;
    await this.act(async () => {
      await post("plan/unpin", reasonOf(answer));
      return "Unpinned: the tuner moves the plan again.";
    });
  }

  async rollBack({ version, pattern, knobs }) {
    const text = `${planText(pattern, knobs.offload_ratio)} comes into force again, as a new version, on all routers.`;
    if (!(await confirm({ title: `Roll back to v${version}?`, text, verb: "Roll back" }))) return;
    await this.act(async () => {
      const { plan, warnings } = await post("plan/rollback", { version });
      return [`Plan v${plan.version} is in force, with the content of v${version}.`, ...warnings].join(" ");
    });
  }

  async act(doing) {
    const [error, done] = [$(".error", this.form), $(".done", this.form)];
    say(error, "");
    say(done, "");
    try {
      say(done, await doing());
      this.modeTouched = false;
      await this.changed();
    } catch (problem) {
      say(error, problem.message);
    }
  }
}

export const reasonOf = ({ reason }) => (reason.trim() ? { reason: reason.trim() } : {});

export const pinned = ({ plan, warnings }) => [`Plan v${plan.version} is pinned.`, ...warnings].join(" ");

export async function readPlan() {
  const [why, history] = await Promise.all([get("explain"), get("plan/history?count=30")]);
  return { why, history };
}

function roles({ roles: given }) {
  const names = Object.values(given);
  const parts = ["prefill", "decode", "mixed"].map((role) => [names.filter((name) => name === role).length, role]);
  const said = parts.filter(([engines]) => engines).map(([engines, role]) => `${engines} ${role}`);
  return said.length ? said.join(", ") : "every engine mixed";
}

function candidateTable() {
  const head = ["", "Candidate", "Goodput", "Gain", "Lowest attainment"];
  const cells = head.map((name) => h("th", { scope: "col", textContent: name }));
  cells.slice(2).forEach((cell) => (cell.className = "number"));
  cells[0].replaceChildren(h("span", { className: "unseen", textContent: "Rank" }));
  return h("table", {}, h("caption"), h("thead", {}, h("tr", {}, ...cells)), h("tbody"));
}

const gain = ({ gain, gain_se }) => `${gain >= 0 ? "+" : "−"}${Math.abs(gain).toFixed(2)} ± ${gain_se.toFixed(2)}`;

function lowest({ classes }) {
  const shares = Object.values(classes).map((each) => each.attainment).filter((share) => share !== null);
  return percent(shares.length ? Math.min(...shares) : null);
}
