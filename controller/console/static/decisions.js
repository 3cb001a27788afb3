// What the tuner decided, tick by tick, newest first.

import { get } from "./api.js";
import { $, h, keyed, say, show } from "./dom.js";
import { ago, candidateText, clock, percent, rate } from "./format.js";

const PAGE = 20;
const MOST = 400;
const SILENCE_S = 180;

export class Decisions {
  constructor() {
    this.known = new Map();
    this.before = null;
    this.onlyChanges = $("#only-changes");
    this.onlyChanges.addEventListener("change", () => this.draw());
    $("#older").addEventListener("click", () => this.older());
  }

  /** Look for news; true if there are any. */
  async update() {
    const newest = (await get("decisions?count=1")).decisions[0];
    if (newest === undefined || this.known.has(newest.id)) return false;
    const page = await get(`decisions?count=${PAGE}`);
    // A gap between the page and what is known (a sleeping tab) would look like silence: begin anew.
    if (!page.decisions.some((each) => this.known.has(each.id))) {
      this.known.clear();
      this.before = page.before;
    }
    this.add(page.decisions);
    return true;
  }

  /** Say how long ago the newest was made: a leader writes one at least every minute. */
  age(now_s) {
    const [newest] = this.known.values();
    if (newest === undefined) return;
    const silent = now_s - newest.at_s > SILENCE_S;
    say($("#decision-age"), `newest ${ago(newest.at_s, now_s)}${silent ? ": does any controller lead?" : ""}`);
    $("#decision-age").dataset.state = silent ? "bad" : "";
  }

  async older() {
    say($("#decisions > .error"), "");
    try {
      const page = await get(`decisions?count=${PAGE}&before=${encodeURIComponent(this.before)}`);
      this.before = page.before;
      this.add(page.decisions);
    } catch (problem) {
      say($("#decisions > .error"), problem.message);
    }
  }

  add(decisions) {
    for (const decision of decisions) this.known.set(decision.id, decision);
    const sorted = [...this.known.values()].sort((one, other) => other.at_s - one.at_s);
    this.known = new Map(sorted.slice(0, MOST).map((each) => [each.id, each]));
    this.draw();
  }

  draw() {
    const all = [...this.known.values()];
    const shown = this.onlyChanges.checked ? all.filter((each) => each.published_version !== null) : all;
    keyed($("#decision-list"), shown, (each) => each.id, decisionItem, () => {});
    const nothing = all.length
      ? "None of the decisions read so far changed the plan."
      : "No decision has been written down yet. The leading controller writes one a tick.";
    say($("#decisions .empty"), nothing);
    show($("#decisions .empty"), shown.length === 0);
    show($("#older"), this.before !== null && all.length < MOST);
  }
}

/** Decisions never change, so an item is made once. */
function decisionItem(decision) {
  const changed = decision.published_version !== null;
  const item = h("li", {}, heading(decision), h("p", { textContent: decision.sentence }), evidence(decision));
  item.dataset.state = decision.refused !== null ? "bad" : changed ? "changed" : "";
  return item;
}

function heading({ at_s, reason, mode, plan_version, published_version, refused }) {
  const plan = published_version === null ? `v${plan_version} stays` : `v${plan_version} → v${published_version}`;
  return h(
    "p",
    { className: "what" },
    h("time", { textContent: clock(at_s), dateTime: new Date(1000 * at_s).toISOString() }),
    h("b", { textContent: reason.replaceAll("_", " ") }),
    h("span", { textContent: plan }),
    mode === "auto" ? null : h("span", { textContent: `mode ${mode}` }),
    refused === null ? null : h("span", { textContent: `not put in force: ${refused}` }),
  );
}

function evidence({ measured, promise, drifted, search }) {
  const said = [];
  if (measured) said.push(`measured ${rate(measured.goodput_rps)} of ${rate(measured.offered_rps)}${shares(measured)}`);
  if (promise) said.push(`expected ${rate(promise.goodput_rps)} of ${rate(promise.offered_rps)}`);
  if (search) said.push(`in force predicted ${rate(search.incumbent.goodput_rps)}, best of ${search.trials} tried ${best(search)}`);
  if (drifted.length) said.push(`moved: ${drifted.join(", ").replaceAll("_", " ")}`);
  return said.length ? h("p", { className: "note", textContent: said.join(" · ") }) : null;
}

const best = ({ ranked }) => (ranked.length ? `${rate(ranked[0].goodput_rps)} (${candidateText(ranked[0].candidate)})` : "none");

function shares({ attainment }) {
  const said = Object.entries(attainment).map(([name, share]) => `${name} ${percent(share)}`);
  return said.length ? ` (${said.join(", ")})` : "";
}
