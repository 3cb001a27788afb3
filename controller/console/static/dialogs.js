// The two questions the page may ask: for the token, and whether to go ahead.

import { $, say, show } from "./dom.js";

/** The token that was typed; `null` if the operator did not want to. */
export async function askToken(complaint) {
  const dialog = $("#token-dialog");
  say($(".error", dialog), complaint);
  const answer = await ask(dialog);
  return answer?.token.trim() || null;
}

/** Ask before acting: `{reason}` as typed (empty without), or `null` for "no". */
export async function confirm({ title, text, verb, reason = false }) {
  const dialog = $("#confirm-dialog");
  say($("h2", dialog), title);
  say($("p", dialog), text);
  say($("button", dialog), verb);
  show($("label", dialog), reason);
  return ask(dialog);
}

function ask(dialog) {
  const form = $("form", dialog);
  form.reset();
  dialog.showModal();
  return new Promise((resolve) => {
    const done = new AbortController();
    const listen = (target, type, act) => target.addEventListener(type, act, { signal: done.signal });
    let answer = null;
    listen(form, "submit", (event) => {
      event.preventDefault();
      answer = Object.fromEntries(new FormData(form));
      dialog.close();
    });
    listen($("button[value=cancel]", form), "click", () => dialog.close());
    listen(dialog, "close", () => {
      done.abort();
      form.reset();
      resolve(answer);
    });
  });
}
