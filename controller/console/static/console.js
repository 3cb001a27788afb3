// The page's one loop: ask the API, hand each answer to its panel, say when it does not answer.

import { forgetToken, get, hasToken } from "./api.js";
import { Decisions } from "./decisions.js";
import { $, announce, h, say, show } from "./dom.js";
import { Fleet } from "./fleet.js";
import { clock, planText } from "./format.js";
import { Goodput } from "./goodput.js";
import { PlanPanel, readPlan } from "./plan.js";
import { SloPanel, readSlos } from "./slo.js";
import { WhatIf } from "./whatif.js";

const EVERY_MS = 1500;

const refresh = () => console_.poll();
const goodput = new Goodput();
const fleet = new Fleet();
const decisions = new Decisions();
const plan = new PlanPanel(refresh);
const slos = new SloPanel(refresh);
const whatIf = new WhatIf(refresh);

class Console {
  constructor() {
    this.answered = null;
    this.seen = { plan: undefined, mode: undefined, slo: undefined };
    this.polling = null;
    this.again = false;
    this.denied = false;
  }

  /** Poll until the page is closed; not while nobody looks, nor while the token is refused. */
  async run() {
    for (;;) {
      if (!document.hidden && !this.denied) await this.poll();
      await new Promise((wake) => setTimeout(wake, EVERY_MS));
    }
  }

  /** One round. A call during a round asks for another right after it. */
  poll() {
    this.again = this.polling !== null;
    this.polling ??= this.rounds().finally(() => (this.polling = null));
    return this.polling;
  }

  async rounds() {
    do {
      this.again = false;
      await this.round();
    } while (this.again);
  }

  async round() {
    try {
      await this.read();
      this.answered = Date.now() / 1000;
      this.trouble(null);
    } catch (problem) {
      this.denied = problem.status === 401;
      this.trouble(problem);
    }
    show($("#forget-token"), hasToken());
  }

  async read() {
    const live = await get(`live?span_s=${$("#span").value}`);
    const [engines, routers, mode, news] = await Promise.all([
      get("engines"),
      get("routers"),
      get("mode"),
      decisions.update(),
    ]);
    goodput.update(live);
    decisions.age(live.now_s);
    fleet.update(engines, routers, live.slo_version);
    whatIf.engines(engines.engines.filter((each) => !each.load.draining).length);
    say($("#fact-model"), engines.engines[0]?.info.model ?? "–");
    await this.documents(live, mode, news);
    slos.applied(routers);
  }

  /** Documents are read again only when their version has changed, or the tuner has said something. */
  async documents(live, mode, news) {
    const { seen } = this;
    if (news || seen.plan !== live.plan_version || seen.mode !== mode.version) {
      const { why, history } = await readPlan();
      plan.update(why, history);
      tell(seen, why);
      this.seen = { ...this.seen, plan: why.plan?.version ?? null, mode: why.mode.version };
    }
    if (seen.slo !== live.slo_version) {
      const table = await readSlos();
      slos.update(table);
      this.seen.slo = table.version;
    }
  }

  trouble(problem) {
    const place = $("#trouble");
    say($("#fact-updated"), this.answered === null ? "not yet" : clock(this.answered));
    if (problem === null) return place.replaceChildren();
    const old = this.answered === null ? "" : ` The figures are from ${clock(this.answered)}.`;
    const text = problem instanceof Error && "status" in problem ? problem.message + old : `The page failed: ${problem}.`;
    if (place.textContent.startsWith(text)) return;
    const retry = h("button", { type: "button", textContent: "Enter token", onclick: () => this.retry() });
    place.replaceChildren(h("p", { className: "trouble" }, text, this.denied ? retry : null));
  }

  retry() {
    this.denied = false;
    this.poll();
  }
}

function tell(seen, { plan: now, mode }) {
  const text = now === null ? "none" : `v${now.version} ${planText(now.pattern, now.knobs.offload_ratio)}`;
  say($("#fact-plan"), text);
  if (seen.plan !== undefined && now !== null && seen.plan !== now.version) announce(`Plan ${text} is in force.`);
  if (seen.mode !== undefined && seen.mode !== mode.version) announce(`Mode is ${mode.mode}.`);
}

const console_ = new Console();
$("#span").addEventListener("change", refresh);
document.addEventListener("visibilitychange", () => !document.hidden && !console_.denied && refresh());
$("#forget-token").addEventListener("click", () => {
  forgetToken();
  location.reload();
});
console_.run();
