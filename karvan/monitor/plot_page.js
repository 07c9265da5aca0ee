"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = document.querySelector("body > svg").namespaceURI;
  const COLOURS = ["#2f6fde", "#e07a1f", "#2a9d5c", "#d23f57", "#8a5bd6", "#12a5b5", "#b0752b", "#d65db1", "#7c8a2e", "#7b8494"];
  const DASHES = ["", "6 4", "2 3", "9 3 2 3"];
  const HEIGHT = 230, LEFT = 60, RIGHT = 10, TOP = 10, BOTTOM = 24;
  const MANY = 300; // reports, from which on a line that is not smoothed looks like a band
  const most = Math.max(...data.runs.map((run) => run.train.step.length));
  const state = { smoothing: most > MANY ? 0.9 : 0, axis: "step", hidden: new Set(), range: null };

  // ---------------------------------------------------------------- elements
  const element = (name, options = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(options)) {
      if (key === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
      else if (key in made) made[key] = value;
      else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  };
  const drawn = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const colour = (index) =>
    index < COLOURS.length ? COLOURS[index] : `hsl(${Math.round(index * 137.5) % 360} 60% 50%)`;
  const swatch = (index) => {
    const made = element("span", { className: "swatch" });
    made.style.background = colour(index);
    return made;
  };

  // ---------------------------------------------------------------- numbers as text
  const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  const scaled = (value, units, base) => {
    let index = 0;
    while (Math.abs(value) >= base && index < units.length - 1) { value /= base; index += 1; }
    return trimmed(value.toPrecision(Math.abs(value) >= 100 ? 4 : 3)) + units[index];
  };
  const BYTES = [" B", " KiB", " MiB", " GiB", " TiB"];
  const FORMS = {
    count: (value) => scaled(value, ["", "k", "M", "G", "T"], 1000),
    bytes: (value) => scaled(value, BYTES, 1024),
    plain: (value) => {
      const size = Math.abs(value);
      if (size === 0) return "0";
      if (size < 1e-3 || size >= 1e6) return trimmed(value.toExponential(2)).replace(/\.?0+e/, "e").replace("e+", "e");
      return trimmed(value.toPrecision(5));
    },
  };
  const duration = (seconds) => {
    if (seconds < 120) return `${trimmed(seconds.toFixed(1))} s`;
    if (seconds < 7200) return `${trimmed((seconds / 60).toFixed(1))} min`;
    return `${trimmed((seconds / 3600).toFixed(2))} h`;
  };
  const AXES = {
    step: { label: "step", text: (value) => FORMS.count(value), exact: (value) => `step ${value.toLocaleString("en")}` },
    samples: { label: "samples", text: (value) => FORMS.count(value), exact: (value) => `${value.toLocaleString("en")} samples` },
    seconds: { label: "time", text: duration, exact: duration },
  };
  const exact = (form, value) =>
    form === "plain" ? trimmed(value.toPrecision(6)) : form === "bytes" ? FORMS.bytes(value) : Math.round(value).toLocaleString("en");

  // ---------------------------------------------------------------- series and scales
  const smooth = (values, weight) => {
    // An exponential mean without the pull to zero of its first values.
    let mean = 0, total = 0;
    return values.map((value) => {
      if (value === null || !weight) return value;
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  };
  const linesOf = (chart, view) => {
    const lines = [];
    data.runs.forEach((run, runIndex) => {
      if (state.hidden.has(runIndex)) return;
      view.lines.forEach((line, lineIndex) => {
        const values = run[line.kind].values[line.name];
        if (!values) return;
        const x = run[line.kind][state.axis];
        const points = x.map((_, i) => i).filter((i) => x[i] !== null && values[i] !== null
          && (!state.range || (x[i] >= state.range[0] && x[i] <= state.range[1])));
        if (!points.length) return;
        const weight = chart.noisy && line.kind === "train" ? state.smoothing : 0;
        const smoothed = smooth(values, weight);
        lines.push({
          x: points.map((i) => x[i]), raw: points.map((i) => values[i]), y: points.map((i) => smoothed[i]),
          colour: view.byLine ? lineIndex : runIndex, dash: view.byLine ? "" : DASHES[lineIndex % DASHES.length],
          dots: line.kind === "eval" || points.length < 3, smoothed: weight > 0,
          name: [data.runs.length > 1 ? run.name : "", line.label].filter(Boolean).join(" · ") || run.name,
        });
      });
    });
    return lines;
  };
  const ticks = (low, high, count, log) => {
    if (log) {
      const found = [];
      const decades = Math.log10(high / low);
      const steps = decades > 4 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
      const every = Math.max(1, Math.ceil(decades / count));
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high) + 1e-9; power += every) {
        for (const step of steps) {
          const tick = step * 10 ** power;
          if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) found.push(tick);
        }
      }
      const skip = Math.ceil(found.length / (count + 2));
      return found.length > 1 ? found.filter((_, i) => i % skip === 0) : ticks(low, high, count, false);
    }
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((size) => size >= rough * (1 - 1e-9));
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(Number((i * step).toPrecision(12)));
    return found;
  };
  const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);

  // Of more points than pixels, the first, lowest, highest and last of each column look the same.
  const thin = (points, width) => {
    if (points.length <= 4 * width) return points;
    const columns = new Map();
    for (const point of points) {
      const column = Math.round(point[0]);
      const seen = columns.get(column);
      if (!seen) { columns.set(column, [point, point, point, point]); continue; }
      if (point[1] < seen[1][1]) seen[1] = point;
      if (point[1] > seen[2][1]) seen[2] = point;
      seen[3] = point;
    }
    return [...columns.values()].flat();
  };
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

  // ---------------------------------------------------------------- one chart
  const makeChart = (chart) => {
    const own = { view: 0, log: false };
    const svg = drawn("svg", { role: "img" });
    const keys = element("div", { className: "keys" });
    const tip = element("div", { className: "tip", hidden: true });
    const log = element("button", {
      type: "button", textContent: "log", title: "logarithmic scale", "aria-pressed": "false",
      on: { click: () => { own.log = !own.log; log.setAttribute("aria-pressed", own.log); draw(); } },
    });
    const tools = element("div", { className: "tools" });
    if (chart.views.length > 1) {
      tools.append(element("select", { "aria-label": "what is shown", on: { change: (event) => { own.view = Number(event.target.value); draw(); } } },
        ...chart.views.map((view, i) => element("option", { value: i, textContent: view.label }))));
    }
    tools.append(log);
    const heading = element("h3", { textContent: chart.title });
    if (chart.unit) heading.append(element("small", { textContent: chart.unit }));
    const card = element("section", { className: "chart" }, element("div", { className: "top" }, heading, tools), keys, element("div", { className: "plot" }, svg, tip));
    svg.setAttribute("aria-label", chart.title);
    let scene = null;

    const draw = () => {
      const width = svg.clientWidth || 440;
      const view = chart.views[own.view];
      const lines = linesOf(chart, view);
      svg.replaceChildren();
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      tip.hidden = true;
      scene = null;
      drawKeys(view, lines);
      if (!lines.length) {
        svg.append(drawn("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no numbers"));
        return;
      }
      let [low, high] = extent(lines.flatMap((line) => extent(line.smoothed ? line.y : line.raw)));
      if (chart.reference !== undefined) { low = Math.min(low, chart.reference); high = Math.max(high, chart.reference); }
      if (high - low < 1e-9 * Math.abs(high)) low = high; // constant, up to rounding
      const logarithmic = own.log && low > 0;
      if (logarithmic) { const pad = (high / low) ** 0.05 || 1; low /= Math.max(pad, 1.02); high *= Math.max(pad, 1.02); }
      else {
        const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
        low = low >= 0 && low - pad < 0 ? 0 : low - pad;
        high += pad;
      }
      let [first, last] = state.range || extent(lines.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]));
      if (first === last) { first -= 0.5; last += 0.5; }
      const x = (value) => LEFT + ((value - first) / (last - first)) * (width - LEFT - RIGHT);
      const share = (value) => logarithmic ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
      const y = (value) => HEIGHT - BOTTOM - share(value) * (HEIGHT - TOP - BOTTOM);
      // Round numbers of bytes are round in KiB, MiB or GiB.
      const unit = chart.form === "bytes" ? 1024 ** Math.min(4, Math.floor(Math.log(high) / Math.log(1024))) : 1;
      for (const tick of ticks(low / unit, high / unit, 5, logarithmic).map((round) => round * unit)) {
        svg.append(drawn("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }),
          drawn("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, FORMS[chart.form](tick)));
      }
      const axis = AXES[state.axis];
      const below = ticks(Math.max(first, 0), last, Math.max(2, Math.floor(width / 75)), false);
      for (const tick of below) {
        if (x(tick) > width - RIGHT - 60) continue; // the axis' own name is there
        if (state.axis !== "seconds" && !Number.isInteger(tick)) continue;
        svg.append(drawn("text", { x: x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, axis.text(tick)));
      }
      svg.append(drawn("text", { x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, `${axis.label} →`),
        drawn("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM }));
      if (chart.reference !== undefined) {
        svg.append(drawn("line", { class: "reference", x1: LEFT, x2: width - RIGHT, y1: y(chart.reference), y2: y(chart.reference) }));
      }
      const clipped = (value) => Math.min(Math.max(y(Math.max(value, logarithmic ? low : -Infinity)), TOP - 4), HEIGHT - BOTTOM + 2);
      for (const line of lines) {
        const points = (values) => thin(line.x.map((at, i) => [x(at), clipped(values[i])]), width);
        const style = { fill: "none", stroke: colour(line.colour), "stroke-linejoin": "round", "stroke-dasharray": line.dash };
        if (line.smoothed) svg.append(drawn("path", { ...style, d: path(points(line.raw)), "stroke-width": 1, opacity: 0.25 }));
        svg.append(drawn("path", { ...style, d: path(points(line.y)), "stroke-width": 1.8 }));
        if (line.dots && line.x.length <= width / 6) {
          line.x.forEach((at, i) => svg.append(drawn("circle", { cx: x(at), cy: clipped(line.y[i]), r: 2.6, fill: colour(line.colour) })));
        }
      }
      scene = { lines, x, y: clipped, width, marks: drawn("g", {}), from: (px) => first + ((px - LEFT) / (width - LEFT - RIGHT)) * (last - first) };
      svg.append(scene.marks);
    };

    const drawKeys = (view, lines) => {
      keys.replaceChildren();
      if (view.byLine) {
        view.lines.forEach((line, i) => keys.append(element("span", {}, swatch(i), line.label)));
      } else if (view.lines.length > 1 && lines.length) {
        view.lines.forEach((line, i) => {
          const sample = drawn("svg", { width: 22, height: 8, style: "width:22px;height:8px" });
          sample.append(drawn("line", { x1: 0, x2: 22, y1: 4, y2: 4, stroke: "currentColor", "stroke-width": 1.8, "stroke-dasharray": DASHES[i % DASHES.length] }));
          if (line.kind === "eval") sample.append(drawn("circle", { cx: 11, cy: 4, r: 2.6, fill: "currentColor" }));
          keys.append(element("span", {}, sample, line.label));
        });
      }
    };

    const nearest = (line, at) => {
      let low = 0, high = line.x.length - 1;
      while (high - low > 1) { const middle = (low + high) >> 1; if (line.x[middle] < at) low = middle; else high = middle; }
      return Math.abs(line.x[low] - at) <= Math.abs(line.x[high] - at) ? low : high;
    };
    const hover = (px) => {
      scene.marks.replaceChildren();
      const at = scene.from(px);
      const found = scene.lines.map((line) => [line, nearest(line, at)]);
      const closest = found.reduce((a, b) => (Math.abs(b[0].x[b[1]] - at) < Math.abs(a[0].x[a[1]] - at) ? b : a));
      const where = closest[0].x[closest[1]];
      scene.marks.append(drawn("line", { class: "cursor", x1: scene.x(where), x2: scene.x(where), y1: TOP, y2: HEIGHT - BOTTOM }));
      const rows = found.map(([line, i]) => {
        scene.marks.append(drawn("circle", { cx: scene.x(line.x[i]), cy: scene.y(line.y[i]), r: 3.5, fill: colour(line.colour) }));
        const off = line.x[i] === where ? "" : ` (${AXES[state.axis].exact(line.x[i])})`;
        return element("tr", {}, element("td", {}, swatch(line.colour)), element("td", { textContent: line.name + off }),
          element("td", { textContent: exact(chart.form, line.y[i]) }));
      });
      tip.replaceChildren(element("div", { textContent: AXES[state.axis].exact(where) }), element("table", {}, element("tbody", {}, ...rows)));
      tip.hidden = false;
      const beside = scene.x(where) > scene.width / 2 ? scene.x(where) - tip.offsetWidth - 12 : scene.x(where) + 12;
      tip.style.left = `${Math.max(0, Math.min(scene.width - tip.offsetWidth, beside))}px`;
    };
    const pixel = (event) => Math.min(Math.max(event.clientX - svg.getBoundingClientRect().left, LEFT), (scene ? scene.width : 440) - RIGHT);
    let start = null;
    svg.addEventListener("pointermove", (event) => {
      if (!scene) return;
      hover(pixel(event));
      if (start !== null && Math.abs(pixel(event) - start) > 4) {
        const [a, b] = [start, pixel(event)].sort((p, q) => p - q);
        scene.marks.append(drawn("rect", { class: "selection", x: a, y: TOP, width: b - a, height: HEIGHT - TOP - BOTTOM }));
      }
    });
    svg.addEventListener("pointerleave", () => { tip.hidden = true; if (scene) scene.marks.replaceChildren(); start = null; });
    svg.addEventListener("pointerdown", (event) => { if (scene) start = pixel(event); });
    svg.addEventListener("pointerup", (event) => {
      if (start !== null && scene && Math.abs(pixel(event) - start) > 8) {
        state.range = [start, pixel(event)].sort((p, q) => p - q).map(scene.from);
        drawAll();
      }
      start = null;
    });
    svg.addEventListener("dblclick", () => { state.range = null; drawAll(); });
    return { card, draw };
  };

  // ---------------------------------------------------------------- the page
  const root = document.documentElement;
  const frame = window.frameElement; // of a notebook or another page, whose letters are light if it is dark
  const isDark = () => {
    if (!frame) return matchMedia("(prefers-color-scheme: dark)").matches;
    const [red, green, blue] = frame.ownerDocument.defaultView.getComputedStyle(frame).color.match(/[\d.]+/g).map(Number);
    return red + green + blue > 1.5 * 255;
  };
  const takeTheme = () => { root.dataset.theme = isDark() ? "dark" : "light"; };
  takeTheme();
  if (frame) {
    root.dataset.framed = "";
    new MutationObserver(takeTheme).observe(frame.ownerDocument.body, { attributes: true });
  }
  const charts = [];
  const place = document.getElementById("charts");
  let grid = null, section = null;
  for (const chart of data.charts) {
    if (chart.section !== section) {
      section = chart.section;
      grid = element("div", { className: "grid" });
      place.append(element("h2", { textContent: section }), grid);
    }
    const made = makeChart(chart);
    charts.push(made);
    grid.append(made.card);
  }
  const whole = element("button", { type: "button", textContent: "whole range", title: "drag in a chart to zoom", on: { click: () => { state.range = null; drawAll(); } } });
  const drawAll = () => { whole.hidden = state.range === null; charts.forEach((chart) => chart.draw()); };

  const axes = Object.keys(AXES).filter((axis) => data.runs.every((run) => ["train", "eval"].every((kind) => run[kind][axis].every((value) => value !== null))));
  const shown = element("output", { textContent: state.smoothing });
  document.getElementById("controls").append(whole,
    element("label", {}, "smoothing", element("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: state.smoothing,
      on: { input: (event) => { state.smoothing = Number(event.target.value); shown.textContent = event.target.value; drawAll(); } },
    }), shown),
    element("label", {}, "x axis", element("select", { on: { change: (event) => { state.axis = event.target.value; state.range = null; drawAll(); } } },
      ...axes.map((axis) => element("option", { value: axis, textContent: AXES[axis].label })))),
    element("button", {
      type: "button", textContent: "dark / light", hidden: Boolean(frame),
      on: { click: () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; } },
    }));
  if (data.runs.length > 1) {
    const legend = document.getElementById("legend");
    data.runs.forEach((run, i) => legend.append(element("button", {
      type: "button", title: run.path, "aria-pressed": "true",
      on: {
        click: (event) => {
          if (!state.hidden.delete(i)) state.hidden.add(i);
          event.currentTarget.setAttribute("aria-pressed", !state.hidden.has(i));
          drawAll();
        },
      },
    }, swatch(i), run.name)));
    document.querySelectorAll("thead th").forEach((head, i) => { if (i) head.prepend(swatch(i - 1), " "); });
  }
  new ResizeObserver(drawAll).observe(place);
})();
