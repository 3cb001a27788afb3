// Engines with roles and load, routers with what they have applied.

import { post } from "./api.js";
import { confirm } from "./dialogs.js";
import { $, announce, fill, h, keyed, row, say, show } from "./dom.js";
import { count, percent } from "./format.js";

export class Fleet {
  /** Answers of `/v1/engines` and `/v1/routers`. */
  update({ engines }, routers, slo_version) {
    this.engines(engines);
    this.routers(routers, slo_version);
  }

  engines(engines) {
    keyed($("#engines tbody"), engines, (each) => each.engine_id, engineRow, fillEngine);
    say($("#engines caption"), `Engines${engines.length ? `: ${byRole(engines)}` : ""}`);
    say($("#engines-empty"), "No engine is alive: `trimtab engine emulated` starts one, `trimtab up` a whole stack.");
    show($("#engines-empty"), engines.length === 0);
  }

  routers({ plan_version, routers }, slo_version) {
    const make = () => row("", "", "", "number", "number");
    keyed($("#routers tbody"), routers, (each) => each.router_id, make, (element, each) => {
      const behind = each.plan_version < plan_version || each.slo_version < slo_version;
      fill(
        element,
        each.router_id + (each.draining ? " (drains)" : ""),
        applied(each.plan_version, plan_version),
        applied(each.slo_version, slo_version),
        count(each.inflight),
        count(each.workers),
      );
      element.dataset.state = behind ? "bad" : "";
    });
    say($("#routers-empty"), "No router is alive: `trimtab router` starts one.");
    show($("#routers-empty"), routers.length === 0);
  }
}

const applied = (own, wanted) => (own < wanted ? `v${own}, behind v${wanted}` : `v${own}, in force`);

function byRole(engines) {
  const roles = ["prefill", "decode", "mixed"].map((role) => [role, engines.filter((each) => each.role === role).length]);
  return roles.filter(([, engines]) => engines).map(([role, engines]) => `${engines} ${role}`).join(", ");
}

function engineRow(engine) {
  const element = row("", "", "number", "number", "number", "", "number", "");
  element.cells[5].append(h("span", { className: "bar" }, h("i")), h("span"));
  const button = h("button", { type: "button", onclick: () => drain(button.dataset.engine, button.dataset.verb) });
  element.cells[7].append(button);
  return element;
}

function fillEngine(element, { engine_id, role, load }) {
  const held = load.kv_used_tokens + load.kv_reserved_tokens;
  const share = load.kv_capacity_tokens ? held / load.kv_capacity_tokens : 0;
  fill(
    element,
    engine_id,
    role + (load.draining ? ", drains" : ""),
    count(load.running),
    count(load.queued),
    count(load.pending_prefill_tokens),
    null,
    count(load.inbound_transfers),
  );
  const [bar, text] = element.cells[5].children;
  bar.firstElementChild.style.setProperty("--share", share.toFixed(3));
  say(text, ` ${percent(share)} of ${count(load.kv_capacity_tokens)}`);
  offer(element.cells[7].firstElementChild, engine_id, load.draining ? "undrain" : "drain");
}

function offer(button, engine, verb) {
  button.dataset.engine = engine;
  button.dataset.verb = verb;
  say(button, verb === "drain" ? "Drain" : "Undrain");
  const label = `${verb === "drain" ? "Drain" : "Undrain"} engine ${engine}`;
  if (button.ariaLabel !== label) button.ariaLabel = label;
}

async function drain(engine, verb) {
  const text = `Engine ${engine} will refuse new work and finish what runs. Undrain takes that back.`;
  if (verb === "drain" && !(await confirm({ title: `Drain ${engine}?`, text, verb: "Drain" }))) return;
  const error = $("#fleet > .error");
  say(error, "");
  try {
    await post(`engines/${encodeURIComponent(engine)}/${verb}`);
    announce(verb === "drain" ? `Engine ${engine} drains.` : `Engine ${engine} takes work again.`);
  } catch (problem) {
    say(error, problem.message);
  }
}
