// The admin API: same host, JSON, problems as errors. The token lives in this tab's sessionStorage only.

import { askToken } from "./dialogs.js";

const TOKEN = "trimtab-admin-token";
const LIMIT_MS = 10_000;
const SIMULATION_LIMIT_MS = 90_000;
const BASE = new URL("../v1/", document.baseURI);

/** The API said no; `message` is its sentence. Status 0: it said nothing. */
export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let asking = null;

export const hasToken = () => sessionStorage.getItem(TOKEN) !== null;
export const forgetToken = () => sessionStorage.removeItem(TOKEN);

export const get = (path) => call("GET", path);
export const put = (path, body) => call("PUT", path, body);
export const post = (path, body, limit_ms) => call("POST", path, body, limit_ms);
export const remove = (path) => call("DELETE", path);
export const simulate = (path, body) => call("POST", path, body, SIMULATION_LIMIT_MS);

async function call(method, path, body, limit_ms = LIMIT_MS) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    const response = await send(method, path, body, token, limit_ms);
    if (response.ok) return response.json();
    const problem = await problemOf(response);
    if (problem.status !== 401) throw problem;
    if (token !== sessionStorage.getItem(TOKEN)) continue;
    // However many calls are refused at once, the question is asked once.
    asking ??= newToken(token === null ? "" : problem.message).finally(() => (asking = null));
    if (!(await asking)) throw problem;
  }
}

async function newToken(complaint) {
  const token = await askToken(complaint);
  if (token !== null) sessionStorage.setItem(TOKEN, token);
  return token !== null;
}

async function send(method, path, body, token, limit_ms) {
  const headers = { accept: "application/json" };
  if (token !== null) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const options = { method, headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(limit_ms) };
  try {
    return await fetch(new URL(path, BASE), { ...options, body: body && JSON.stringify(body) });
  } catch (error) {
    const what = error.name === "TimeoutError" ? `did not answer within ${limit_ms / 1000} s` : "cannot be reached";
    throw new Problem(0, `The controller ${what}.`);
  }
}

async function problemOf(response) {
  const said = await response.json().catch(() => ({}));
  return new Problem(response.status, said.detail ?? `The controller answered with status ${response.status}.`);
}
