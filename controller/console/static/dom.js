// Small helpers over the DOM. Text goes in as text, never as markup.

export const $ = (selector, root = document) => root.querySelector(selector);

/** An element; `properties` are DOM properties, those with a dash are attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "scope" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set text only if it differs, so that screen readers and selections are left alone. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make the children of `parent` stand for `items` in order, keeping the elements of those already there:
 *  what has the focus keeps it. `make(item)` gives an element, `update(element, item)` fills it. */
export function keyed(parent, items, key, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let after = null;
  for (const item of items) {
    const name = String(key(item));
    const element = known.get(name) ?? make(item);
    element.dataset.key = name;
    known.delete(name);
    update(element, item);
    const place = after === null ? parent.firstElementChild : after.nextElementSibling;
    if (place !== element) parent.insertBefore(element, place);
    after = element;
  }
  for (const gone of known.values()) gone.remove();
}

/** A table row whose first cell is its header. */
export function row(first, ...kinds) {
  return h("tr", {}, h("th", { scope: "row", className: first }), ...kinds.map((kind) => h("td", { className: kind })));
}

/** Fill the cells of a row with texts; `null` leaves a cell to somebody else. */
export function fill(element, ...texts) {
  texts.forEach((text, index) => {
    if (text !== null) say(element.cells[index], text);
  });
}

/** Definition pairs, `[name, text]`. */
export function pairs(list, items) {
  keyed(
    list,
    items,
    ([name]) => name,
    ([name]) => h("div", {}, h("dt", { textContent: name }), h("dd")),
    (element, [, text]) => say(element.lastElementChild, text),
  );
}

export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/** Say something to people who hear the page. */
export function announce(text) {
  say($("#announcer"), text);
}
