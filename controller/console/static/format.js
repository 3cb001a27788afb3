// Numbers for people: always with their unit. "–" is what is not known.

export const NOTHING = "–";
const SPACE = "\u202f";

const digits = (value, figures) => {
  if (value === 0) return "0";
  const decimals = Math.max(0, figures - 1 - Math.floor(Math.log10(Math.abs(value))));
  return value.toFixed(Math.min(decimals, 3));
};

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

export const number = (value) => (known(value) ? digits(value, 3) : NOTHING);
export const count = (value) => (known(value) ? Math.round(value).toLocaleString("en").replaceAll(",", SPACE) : NOTHING);
export const rate = (value) => (known(value) ? `${value.toFixed(value < 100 ? 2 : 0)}${SPACE}/s` : NOTHING);
export const ratio = (value) => (known(value) ? value.toFixed(3).replace(/0$/, "") : NOTHING);
export const percent = (share) => (known(share) ? `${(100 * share).toFixed(1)}${SPACE}%` : NOTHING);
export const seconds = (value) => {
  if (!known(value)) return NOTHING;
  return value < 1 ? `${digits(1000 * value, 3)}${SPACE}ms` : `${digits(value, 3)}${SPACE}s`;
};

/** Time of day of Unix seconds. */
export const clock = (at_s) => new Date(1000 * at_s).toLocaleTimeString("en-GB");

/** Like "40 s ago". */
export function ago(at_s, now_s) {
  const passed = Math.max(0, now_s - at_s);
  if (passed < 90) return `${Math.round(passed)}${SPACE}s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)}${SPACE}min ago`;
  if (passed < 48 * 3600) return `${Math.round(passed / 3600)}${SPACE}h ago`;
  return new Date(1000 * at_s).toLocaleDateString("en-GB");
}

/** What a plan is, in a few words: pattern and offload ratio. */
export function planText(pattern, offload_ratio) {
  return pattern === "balanced" ? `balanced r=${ratio(offload_ratio)}` : pattern.replaceAll("_", " ");
}

/** What a candidate of the search is: its pattern, and how it uses the engines. */
export function candidateText({ pattern, knobs, prefill_engines, decode_engines, mixed_engines }) {
  const parts = [
    [prefill_engines, "prefill"],
    [decode_engines, "decode"],
    [mixed_engines, "mixed"],
  ];
  const engines = parts.filter(([engines]) => engines > 0).map(([engines, role]) => `${engines} ${role}`);
  const chunks = knobs.chunked_prefill_tokens ? `, chunks of ${count(knobs.chunked_prefill_tokens)}` : "";
  return `${planText(pattern, knobs.offload_ratio)}, ${engines.join(" + ") || "no engines"}${chunks}`;
}
