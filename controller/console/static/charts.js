// Charts: uPlot with our colours, units and marks. Each is an image with a sentence for those who do not see it.

import uPlot from "./vendor/uPlot.js";
import { clock } from "./format.js";

const DARK = matchMedia("(prefers-color-scheme: dark)");
const FONT = "11px system-ui, sans-serif";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A chart in `place`. `describe()` gives series, axes and scales anew whenever colours or series change. */
export class Chart {
  constructor(place, height, describe) {
    this.place = place;
    this.height = height;
    this.describe = describe;
    this.shape = null;
    this.plot = null;
    this.data = null;
    place.setAttribute("role", "img");
    DARK.addEventListener("change", () => this.draw(true));
    new ResizeObserver(() => this.resize()).observe(place);
  }

  /** Draw `data` (columns, as uPlot takes them). `shape`: names of the series; other names make another plot. */
  show(data, shape, sentence) {
    this.data = data;
    if (this.place.ariaLabel !== sentence) this.place.ariaLabel = sentence;
    const anew = this.plot === null || JSON.stringify(shape) !== JSON.stringify(this.shape);
    this.shape = shape;
    this.draw(anew);
  }

  draw(anew) {
    if (this.data === null) return;
    if (anew) {
      this.plot?.destroy();
      this.plot = new uPlot({ ...this.describe(this.shape), ...this.size() }, this.data, this.place);
    } else {
      this.plot.setData(this.data);
    }
    // A new plot draws itself in a microtask, and empties its legend.
    queueMicrotask(() => this.tell());
  }

  /** While there is no pointer over the chart, its legend shows the values of `told()`, else the newest. */
  tell() {
    if (this.plot.cursor.left < 0) this.plot.setLegend({ idx: this.told?.() ?? this.data[0].length - 1 });
  }

  resize() {
    this.plot?.setSize(this.size());
  }

  size() {
    return { width: Math.max(120, this.place.clientWidth), height: this.height };
  }
}

/** A line, with the colour variable `paint`. */
export function line(label, paint, value, more = {}) {
  return { label, stroke: colour(paint), width: 2, points: { show: false }, value: (_, v) => value(v), ...more };
}

export function axis(more = {}) {
  const faint = { stroke: colour("--line"), width: 1 };
  return { stroke: colour("--quiet"), font: FONT, grid: faint, ticks: { ...faint, size: 4 }, ...more };
}

/** Options of a chart over time of day. */
export function overTime() {
  return {
    series: [{ value: (_, at_s) => (at_s === null ? "–" : clock(at_s)) }],
    axes: [axis({ size: 26, space: timeSpace, values: timeLabels })],
    scales: { x: { time: true } },
    cursor: { drag: { x: false, y: false } },
  };
}

const timeSpace = (_, index, low, high, width_px) => (width_px < 300 ? 44 : 70);

/** Times of day, without seconds where all ticks are on whole minutes. */
function timeLabels(_, ticks, index, space, step_s) {
  return ticks.map((at_s) => (step_s < 60 ? clock(at_s) : clock(at_s).slice(0, 5)));
}

/** Vertical lines where `marks()` says: `[{ at, label }]`, in order; a label is optional. */
export function verticals(marks) {
  return (plot) => {
    let free = -Infinity;
    for (const { at, label = null } of marks()) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
      stroke(plot, [x, plot.bbox.top], [x, plot.bbox.top + plot.bbox.height], "--mark");
      if (label !== null && x > free) free = x + write(plot, label, x + 4, plot.bbox.top + 2, "--quiet") + 8;
    }
  };
}

/** Dashed horizontal lines at the values that `levels()` gives, highest first: `[{ at, label }]`. */
export function horizontals(levels) {
  return (plot) => {
    let taken = -Infinity;
    const { left, width } = plot.bbox;
    for (const { at, label } of levels()) {
      const y = Math.round(plot.valToPos(at, "y", true));
      stroke(plot, [left, y], [left + width, y], "--quiet", [5, 4]);
      if (y < taken) continue;
      write(plot, label, left + width - 4, y + 2, "--quiet", "right");
      taken = y + 16 * devicePixelRatio;
    }
  };
}

function stroke({ ctx }, from, to, paint, dash = []) {
  ctx.save();
  ctx.strokeStyle = colour(paint);
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash(dash.map((length) => length * devicePixelRatio));
  ctx.beginPath();
  ctx.moveTo(...from);
  ctx.lineTo(...to);
  ctx.stroke();
  ctx.restore();
}

function write({ ctx }, text, x, y, paint, align = "left") {
  ctx.save();
  ctx.fillStyle = colour(paint);
  ctx.font = FONT.replace("11px", `${11 * devicePixelRatio}px`);
  ctx.textAlign = align;
  ctx.textBaseline = "top";
  ctx.fillText(text, x, y);
  const { width } = ctx.measureText(text);
  ctx.restore();
  return width;
}
