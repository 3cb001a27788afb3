// SLO targets: one form a class. What the API refuses is shown as its sentence, at the field that it names.

import { get, put, remove } from "./api.js";
import { confirm } from "./dialogs.js";
import { $, announce, h, keyed, say } from "./dom.js";

const FIELDS = [
  { name: "ttft_ms", label: "TTFT bound, ms" },
  { name: "tpot_ms", label: "TPOT bound, ms" },
  { name: "attainment", label: "Attainment, 0 to 1" },
  { name: "weight", label: "Weight" },
];
const CLASS = { name: "class", label: "Class" };

export class SloPanel {
  constructor(changed) {
    this.changed = changed;
    this.saved = null;
    const add = sloForm("", [CLASS, ...FIELDS], "Add class", (values, form) => this.add(values, form));
    for (const [name, value] of Object.entries({ attainment: "0.9", weight: "1" })) add.elements[name].value = value;
    $("#slo-add").append(add);
  }

  /** The answer of `/v1/slo`. Fields that were touched keep what was typed. */
  update({ classes }) {
    const rows = Object.entries(classes).sort(([one], [other]) => one.localeCompare(other));
    keyed($("#slo-forms"), rows, ([name]) => name, ([name]) => this.classForm(name), (form, [, slo]) => fillForm(form, slo));
  }

  /** The answer of `/v1/routers`: says how far the last change has come. */
  applied({ routers }) {
    if (this.saved === null) return;
    const { version, what } = this.saved;
    const by = routers.filter((each) => each.slo_version >= version).length;
    const said = routers.length ? `applied by ${by} of ${routers.length} routers` : "no router is alive to apply it";
    say($("#slo-done"), `${what} SLO version ${version}: ${said}.`);
    if (routers.length && by === routers.length) this.saved = null;
  }

  classForm(name) {
    const form = sloForm(name, FIELDS, "Save", (values) => this.save(name, values, form));
    if (name !== "default") {
      const button = h("button", { type: "button", className: "plain", textContent: "Remove", onclick: () => this.remove(name, form) });
      button.ariaLabel = `Remove class ${name}`;
      $(".row", form).append(button);
    }
    return form;
  }

  async save(name, values, form) {
    await this.act(form, `Class ${name} is saved.`, () => put(`slo/${encodeURIComponent(name)}`, values));
  }

  async add({ class: name, ...values }, form) {
    await this.act(form, `Class ${name} is added.`, () => put(`slo/${encodeURIComponent(name)}`, values));
  }

  async remove(name, form) {
    const text = "Requests of this class then count as default.";
    if (!(await confirm({ title: `Remove class ${name}?`, text, verb: "Remove" }))) return;
    await this.act(form, `Class ${name} is removed.`, () => remove(`slo/${encodeURIComponent(name)}`));
  }

  async act(form, what, doing) {
    complain(form, "");
    try {
      const table = await doing();
      for (const input of form.elements) delete input.dataset.touched;
      if (form.elements.class) form.reset();
      this.saved = { version: table.version, what };
      say($("#slo-done"), `${what} SLO version ${table.version}.`);
      announce(`${what}`);
      this.update(table);
      await this.changed();
    } catch (problem) {
      complain(form, problem.message);
    }
  }
}

export const readSlos = () => get("slo");

function sloForm(name, fields, verb, act) {
  const legend = h("legend", { textContent: name || "New class" });
  const error = h("p", { className: "error", role: "alert", id: `slo-error-${name}` });
  const inputs = fields.map((field) => fieldOf(field, error.id));
  const buttons = h("div", { className: "row" }, h("button", { textContent: verb }));
  const form = h("form", { noValidate: true, className: "slo" }, h("fieldset", {}, legend, ...inputs, buttons, error));
  if (name) $("button", form).ariaLabel = `${verb} class ${name}`;
  form.addEventListener("input", (event) => (event.target.dataset.touched = "yes"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    act(valuesOf(form), form);
  });
  return form;
}

function fieldOf({ name, label }, error) {
  const numeric = name === "class" ? {} : { inputMode: "decimal" };
  const input = h("input", { name, autocomplete: "off", spellcheck: false, ...numeric, "aria-describedby": error });
  return h("label", {}, label, input);
}

/** Numbers as numbers; what is none goes as it was typed, and the API says what is wrong with it. */
function valuesOf(form) {
  const typed = [...new FormData(form)].map(([name, text]) => [name, text.trim()]);
  const value = (name, text) => (name === "class" || text === "" || !Number.isFinite(Number(text)) ? text : Number(text));
  return Object.fromEntries(typed.map(([name, text]) => [name, value(name, text)]));
}

function fillForm(form, slo) {
  for (const { name } of FIELDS) {
    const input = form.elements[name];
    const text = String(slo[name]);
    if (input.dataset.touched !== "yes" && input.value !== text) input.value = text;
  }
}

/** Show the API's sentences, mark the fields they name, and go to the first of them. */
function complain(form, message) {
  say($(".error", form), message);
  const inputs = [...form.elements].filter((input) => input.tagName === "INPUT");
  const names = message.split("; ").map((sentence) => sentence.split(": ")[0]);
  const asked = (input) => names.includes(input.name) || (input.name === "class" && names.includes("name"));
  for (const input of inputs) input.toggleAttribute("aria-invalid", false);
  const wrong = inputs.filter(asked);
  for (const input of wrong) input.setAttribute("aria-invalid", "true");
  wrong[0]?.focus();
}
