// Draws the plots of a page from the JSON in each figure of class "plot": lines, and heat maps of layers.
// Hover shows values, a drag zooms every plot with the same x axis, a double click or Escape zooms out,
// a click on a name hides its line, and "tokens" counts the x axis in tokens. Nothing is fetched.
"use strict";
(() => {
  const HEIGHT = 220, TOP = 8, BOTTOM = 30, LEFT = 46, RIGHT = 12;
  const HEAT = [[232, 236, 247], [127, 148, 227], [59, 76, 192], [125, 29, 111]];
  const plots = [];
  const view = { unit: "steps", zoom: {} };

  const make = (name, attributes, parent, text) => {
    const inSvg = ["svg", "g", "path", "line", "circle", "text", "rect", "image", "clipPath"].includes(name);
    const node = inSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return parent ? parent.appendChild(node) : node;
  };
  const short = (value) => {
    const size = Math.abs(value);
    for (const [limit, unit, suffix] of [[1e12, 1e12, "T"], [1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "K"]])
      if (size >= limit) return `${+(value / unit).toPrecision(4)}${suffix}`;
    return size && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(4));
  };
  const ticks = (low, high, count) => {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((k) => k >= raw) || raw;
    const out = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) out.push(i * step);
    return out;
  };
  const logTicks = (low, high) => {
    const out = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++)
      for (const k of [1, 2, 5]) if (k * 10 ** e >= low && k * 10 ** e <= high) out.push(k * 10 ** e);
    return out.length > 1 ? out : ticks(low, high, 4);
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
  };
  const runningMean = (y, width) => {
    const total = [0];
    for (const value of y) total.push(total[total.length - 1] + value);
    return y.map((_, i) => {
      const reach = Math.min(width, i, y.length - 1 - i);
      return (total[i + reach + 1] - total[i - reach]) / (2 * reach + 1);
    });
  };

  class Plot {
    constructor(figure) {
      this.figure = figure;
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.hidden = new Set();
      this.log = this.data.log;
      const head = make("div", { class: "plot-head" });
      make("b", {}, head, this.data.title);
      if (this.data.series && this.data.series.every((s) => s.y.every((v) => v > 0))) {
        const button = make("button", { title: "logarithmic y axis" }, head, "log");
        button.classList.toggle("on", this.log);
        button.onclick = () => { this.log = button.classList.toggle("on"); this.draw(); };
      }
      this.legend = make("div", { class: "legend" });
      this.svg = make("svg", { height: HEIGHT, role: "img", "aria-label": this.data.title });
      figure.prepend(head, this.legend, this.svg);
      this.svg.addEventListener("pointermove", (event) => this.move(event));
      this.svg.addEventListener("pointerleave", () => plots.forEach((plot) => plot.point(null)));
      this.svg.addEventListener("pointerdown", (event) => { this.start = this.pixel(event); });
      this.svg.addEventListener("pointerup", (event) => this.release(event));
      this.svg.addEventListener("dblclick", () => setZoom(this.axis, null));
      this.makeLegend();
    }
    get axis() { return this.data.tokens ? view.unit : this.data.x_label; }
    xs(series) { return view.unit === "tokens" && series.tokens ? series.tokens : series.x; }
    get lines() {
      return (this.data.series || []).map((s, i) => ({ ...s, i })).filter((s) => !this.hidden.has(s.i) && s.y.length);
    }
    pixel(event) { return event.clientX - this.svg.getBoundingClientRect().left; }
    toX(pixel) { return this.x0 + (pixel - LEFT) / this.width * (this.x1 - this.x0); }
    px(x) { return LEFT + (x - this.x0) / (this.x1 - this.x0) * this.width; }
    py(y) {
      const f = this.isLog ? Math.log : (v) => v;
      return TOP + (f(this.y1) - f(y)) / (f(this.y1) - f(this.y0)) * (HEIGHT - TOP - BOTTOM);
    }
    makeLegend() {
      this.values = (this.data.series || []).map((series, i) => {
        const entry = make("button", { class: "entry", style: `color: var(--series-${series.colour})` }, this.legend);
        make("span", {}, entry, series.name);
        entry.onclick = () => {
          entry.classList.toggle("off");
          if (!this.hidden.delete(i)) this.hidden.add(i);
          this.draw();
        };
        return make("i", {}, entry);
      });
      this.readout = make("span", { class: "readout" }, this.legend);
    }
    extent() {
      const all = this.data.rows ? [this.xs(this.data)] : this.lines.map((s) => this.xs(s));
      const low = Math.min(...all.map((x) => x[0])), high = Math.max(...all.map((x) => x[x.length - 1]));
      [this.x0, this.x1] = view.zoom[this.axis] || [low, high];
      if (!(this.x1 > this.x0)) this.x1 = this.x0 + 1;
    }
    yExtent() {
      let low = Infinity, high = -Infinity;
      const see = (y) => { low = Math.min(low, y); high = Math.max(high, y); };
      for (const series of this.lines)
        this.xs(series).forEach((x, i) => { if (x >= this.x0 && x <= this.x1) see(series.y[i]); });
      if (!view.zoom[this.axis] || low > high) this.data.levels.forEach(([, y]) => see(y));
      if (low > high) [low, high] = [0, 1];
      this.isLog = this.log && low > 0;
      const margin = (high - low || Math.abs(high) || 1) * 0.05;
      [this.y0, this.y1] = this.isLog ? [low / 1.05, high * 1.05] : [low - margin, high + margin];
    }
    draw() {
      this.width = Math.max(80, this.figure.clientWidth - 32 - LEFT - RIGHT);
      this.svg.replaceChildren();
      this.svg.setAttribute("width", this.width + LEFT + RIGHT);
      this.extent();
      if (this.data.rows) this.drawHeat(); else this.drawLines();
      for (const x of ticks(this.x0, this.x1, Math.max(2, this.width / 80)))
        if (this.px(x) < LEFT + this.width + 1)
          make("text", { x: this.px(x), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, this.svg, short(x));
      make("text", { x: LEFT + this.width, y: HEIGHT - 2, "text-anchor": "end" }, this.svg, this.axis);
      this.cursor = make("g", { class: "cursor" }, this.svg);
      this.point(null);
    }
    drawLines() {
      this.yExtent();
      const clip = `clip-${plots.indexOf(this)}`;
      const area = { x: LEFT - 4, y: 0, width: this.width + 8, height: HEIGHT - BOTTOM + 4 };
      make("rect", area, make("clipPath", { id: clip }, this.svg));
      for (const y of this.isLog ? logTicks(this.y0, this.y1) : ticks(this.y0, this.y1, 6)) {
        const at = this.py(y);
        make("line", { class: "grid", x1: LEFT, x2: LEFT + this.width, y1: at, y2: at }, this.svg);
        make("text", { x: LEFT - 6, y: at + 4, "text-anchor": "end" }, this.svg, short(y));
      }
      for (const [name, y] of this.data.levels) {
        const at = this.py(y);
        if (at < TOP - 6 || at > HEIGHT - BOTTOM + 6) continue;
        make("line", { class: "level", x1: LEFT, x2: LEFT + this.width, y1: at, y2: at }, this.svg);
        make("text", { x: LEFT + this.width, y: at - 4, "text-anchor": "end" }, this.svg, `${name} ${short(y)}`);
      }
      const group = make("g", { "clip-path": `url(#${clip})` }, this.svg);
      for (const series of this.lines) {
        const xs = this.xs(series), style = `stroke: var(--series-${series.colour})`;
        const path = (ys) => ys.map((y, i) => `${i ? "L" : "M"}${this.px(xs[i]).toFixed(1)} ${this.py(y).toFixed(1)}`).join("");
        const isSmooth = this.data.smooth && series.y.length > 20;
        make("path", { d: path(series.y), style, class: isSmooth ? "faint" : series.faded ? "faded" : "" }, group);
        if (isSmooth)
          make("path", { d: path(runningMean(series.y, Math.max(2, Math.floor(series.y.length / 50)))), style }, group);
        if (series.y.length < 30)
          series.y.forEach((y, i) => make("circle", { cx: this.px(xs[i]), cy: this.py(y), r: 2.6,
            style: `fill: var(--series-${series.colour})`, class: series.faded ? "faded" : "" }, group));
      }
    }
    drawHeat() {
      const { rows, values, low, high } = this.data, xs = this.xs(this.data);
      const shown = xs.map((_, i) => i).filter((i) => xs[i] >= this.x0 && xs[i] <= this.x1);
      const canvas = make("canvas", { width: Math.max(1, shown.length), height: rows.length });
      const context = canvas.getContext("2d");
      shown.forEach((column, i) => rows.forEach((_, row) => {
        const value = values[column][row];
        if (value === null || value === undefined) return;
        const at = Math.max(0, Math.min(0.9999, (value - low) / (high - low))) * 3, k = Math.floor(at);
        const mix = HEAT[k].map((c, j) => Math.round(c + (HEAT[k + 1][j] - c) * (at - k)));
        context.fillStyle = `rgb(${mix})`;
        context.fillRect(i, rows.length - 1 - row, 1, 1);
      }));
      const height = HEIGHT - TOP - BOTTOM;
      make("image", { href: canvas.toDataURL(), x: LEFT, y: TOP, width: this.width, height,
        preserveAspectRatio: "none", style: "image-rendering: pixelated" }, this.svg);
      const every = Math.ceil(rows.length / 12);
      rows.forEach((name, row) => {
        const y = TOP + (rows.length - row - 0.5) / rows.length * height + 4;
        if (row % every === 0) make("text", { x: LEFT - 6, y, "text-anchor": "end" }, this.svg, name);
      });
    }
    point(x, row) {
      if (!this.cursor) return;
      this.cursor.replaceChildren();
      const inside = x !== null && x >= this.x0 && x <= this.x1;
      if (inside)
        make("line", { x1: this.px(x), x2: this.px(x), y1: TOP, y2: HEIGHT - BOTTOM }, this.cursor);
      this.readout.textContent = inside ? `${this.axis.replace(/s$/, "")} ${Math.round(x).toLocaleString("en")}` : "";
      if (this.data.rows) {
        const { rows, values, low, high } = this.data;
        const column = inside ? values[nearest(this.xs(this.data), x)] : null;
        const text = column && row !== undefined ? `${rows[row]} ${short(column[row])}, ` : `light ${short(low)}, dark ${short(high)}  `;
        this.readout.textContent = text + this.readout.textContent;
        return;
      }
      this.data.series.forEach((series, i) => {
        if (!series.y.length) return;
        const xs = this.xs(series), at = inside ? nearest(xs, x) : xs.length - 1;
        this.values[i].textContent = short(series.y[at]);
        if (inside && !this.hidden.has(i) && xs[at] >= this.x0 && xs[at] <= this.x1)
          make("circle", { cx: this.px(xs[at]), cy: this.py(series.y[at]), r: 3.5,
            style: `fill: var(--series-${series.colour})` }, this.cursor);
      });
    }
    move(event) {
      const pixel = this.pixel(event);
      const main = this.data.rows ? this.data : this.lines[0];
      if (!main) return;
      const xs = this.xs(main), x = xs[nearest(xs, this.toX(pixel))];
      let row;
      if (this.data.rows) {
        const y = (event.clientY - this.svg.getBoundingClientRect().top - TOP) / (HEIGHT - TOP - BOTTOM);
        row = Math.max(0, Math.min(this.data.rows.length - 1, Math.floor((1 - y) * this.data.rows.length)));
      }
      for (const plot of plots) if (plot.axis === this.axis) plot.point(x, plot === this ? row : undefined);
      if (this.start !== undefined && event.buttons) {
        const [a, b] = [this.start, pixel].sort((p, q) => p - q);
        make("rect", { class: "drag", x: a, width: b - a, y: TOP, height: HEIGHT - TOP - BOTTOM }, this.cursor);
      }
    }
    release(event) {
      const [a, b] = [this.start, this.pixel(event)].sort((p, q) => p - q);
      this.start = undefined;
      if (b - a > 6) setZoom(this.axis, [Math.max(this.x0, this.toX(a)), Math.min(this.x1, this.toX(b))]);
    }
  }
  const setZoom = (axis, range) => {
    if (range) view.zoom[axis] = range; else delete view.zoom[axis];
    plots.forEach((plot) => { if (plot.axis === axis) plot.draw(); });
  };
  const drawAll = () => plots.forEach((plot) => plot.draw());

  for (const figure of document.querySelectorAll("figure.plot")) plots.push(new Plot(figure));
  if (plots.some((plot) => plot.data.tokens)) {
    const bar = make("div", { class: "plot-bar" });
    make("span", {}, bar, "x axis");
    const buttons = ["steps", "tokens"].map((unit) => {
      const button = make("button", { class: unit === view.unit ? "on" : "" }, bar, unit);
      button.onclick = () => {
        view.unit = unit;
        buttons.forEach((other) => other.classList.toggle("on", other === button));
        drawAll();
      };
      return button;
    });
    make("span", {}, bar, "drag to zoom, double click to zoom out, click a name to hide its line");
    plots[0].figure.parentElement.before(bar);
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { view.zoom = {}; drawAll(); }
  });
  addEventListener("resize", drawAll);
  drawAll();
})();
