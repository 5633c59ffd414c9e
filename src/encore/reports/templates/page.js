"use strict";

// Draws the charts and the table from the numbers in #data. Text goes into the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  // -- words ---------------------------------------------------------------------------------------------------------

  const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

  function unitOf(size) {
    const power = size > 0 ? Math.floor(Math.log2(size) / 10) : 0;
    return Math.max(0, Math.min(UNITS.length - 1, power));
  }

  function bytesText(size) {
    const unit = unitOf(size);
    return `${(size / 1024 ** unit).toFixed(unit ? 2 : 0)} ${UNITS[unit]}`;
  }

  function secondsText(seconds) {
    if (seconds === 0) return "0";
    if (seconds < 1e-3) return `${(seconds * 1e6).toPrecision(3)} \u00b5s`;
    if (seconds < 1) return `${(seconds * 1e3).toPrecision(3)} ms`;
    return `${seconds.toPrecision(3)} s`;
  }

  function niceStep(span, steps) {
    const rough = span / steps;
    const power = 10 ** Math.floor(Math.log10(rough));
    const factor = [1, 2, 2.5, 5, 10].find((candidate) => candidate * power >= rough);
    return factor * power;
  }

  function ticks(low, high, steps) {
    const step = niceStep(high - low, steps);
    const found = [];
    for (let number = Math.ceil(low / step - 1e-9); number * step <= high * (1 + 1e-9); number++) found.push(number * step + 0);
    return found;
  }

  const shortNumber = (value) => String(Number(value.toPrecision(6)));

  // -- elements ------------------------------------------------------------------------------------------------------

  function make(name, attributes = {}, ...children) {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function draw(parent, name, attributes = {}, text = null) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }

  // -- theme ---------------------------------------------------------------------------------------------------------

  const root = document.documentElement;
  const themeButton = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
  }

  function showTheme() {
    themeButton.setAttribute("aria-pressed", String(isDark()));
  }

  themeButton.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  showTheme();

  // -- charts: a frame with axes, and a cursor that the pointer or the keyboard moves ----------------------------------

  const tip = document.getElementById("tip");

  function showTip(content, clientX, clientY) {
    tip.replaceChildren(...content);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = clientX + 16 + box.width > innerWidth - 8 ? clientX - 16 - box.width : clientX + 16;
    const top = Math.min(clientY + 12, innerHeight - box.height - 8);
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  }

  function hideTip() {
    tip.hidden = true;
  }

  function frame(holder, label, scale) {
    const width = Math.max(240, holder.clientWidth);
    const height = Math.max(180, holder.clientHeight);
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("tabindex", "0");
    svg.setAttribute("aria-label", label);
    holder.replaceChildren(svg);
    const plot = { left: 58, right: width - 12, top: 26, bottom: height - 40 };
    const x = (value) => plot.left + ((value - scale.x[0]) / (scale.x[1] - scale.x[0])) * (plot.right - plot.left);
    const y = (value) => plot.bottom - ((value - scale.y[0]) / (scale.y[1] - scale.y[0])) * (plot.bottom - plot.top);
    const unit = unitOf(scale.y[1]);
    for (const value of ticks(scale.y[0] / 1024 ** unit, scale.y[1] / 1024 ** unit, 5)) {
      const at = y(value * 1024 ** unit);
      draw(svg, "line", { class: "grid", x1: plot.left, x2: plot.right, y1: at, y2: at });
      draw(svg, "text", { x: plot.left - 6, y: at + 4, "text-anchor": "end" }, shortNumber(value));
    }
    for (const value of ticks(scale.x[0], scale.x[1], width < 420 ? 3 : 6)) {
      draw(svg, "line", { class: "axis", x1: x(value), x2: x(value), y1: plot.bottom, y2: plot.bottom + 4 });
      draw(svg, "text", { x: x(value), y: plot.bottom + 17, "text-anchor": "middle" }, scale.xText(value));
    }
    draw(svg, "line", { class: "axis", x1: plot.left, x2: plot.right, y1: plot.bottom, y2: plot.bottom });
    draw(svg, "text", { x: plot.left - 50, y: 12, class: "y-title" }, `${scale.yTitle} (${UNITS[unit]})`);
    draw(svg, "text", { x: (plot.left + plot.right) / 2, y: height - 5, "text-anchor": "middle", class: "x-title" }, scale.xTitle);
    return { svg, plot, x, y, width, height };
  }

  // Puts labels where they cover nothing: the first of the places, [x, y, anchor], that is free of other labels and of
  // the `marks`, which are points.
  function labeller({ svg, plot }, marks) {
    const taken = marks.map(([x, y]) => ({ x: x - 5, y: y - 5, width: 10, height: 10 }));
    const free = (box) =>
      box.x >= 2 && box.x + box.width <= plot.right + 10 && box.y >= 0 &&
      taken.every((other) => box.x > other.x + other.width + 4 || other.x > box.x + box.width + 4 || box.y > other.y + other.height || other.y > box.y + box.height);
    return (text, kind, places, optional = false) => {
      const label = draw(svg, "text", { class: `${kind} halo` }, text);
      const put = ([x, y, anchor]) => {
        label.setAttribute("x", x);
        label.setAttribute("y", y);
        label.setAttribute("text-anchor", anchor);
        return label.getBBox();
      };
      if (places.some((place) => free(put(place)))) taken.push(label.getBBox());
      else if (optional) label.remove();
      else taken.push(put(places[0]));
    };
  }

  function acrossLabel(chart, label, text, kind, value) {
    const { plot, y } = chart;
    const across = (height) => [1, 0.8, 0.6, 0.4].map((share) => [plot.left + share * (plot.right - plot.left) - 4, height, "end"]);
    label(text, kind, [-5, 18, -20].flatMap((down) => across(y(value) + down)));
  }

  function acrossLine(chart, kind, value) {
    draw(chart.svg, "line", { class: kind, x1: chart.plot.left, x2: chart.plot.right, y1: chart.y(value), y2: chart.y(value) });
  }

  function budgetLabel(chart, label, budget, highest) {
    if (budget === null) return;
    const { plot } = chart;
    const high = [[plot.right - 4, plot.top + 10, "end"], [plot.left + 4, plot.top + 10, "start"]];
    if (budget > highest) label(`budget ${bytesText(budget)} (above this chart)`, "budget-label", high);
    else acrossLabel(chart, label, `budget ${bytesText(budget)}`, "budget-label", budget);
  }

  // `stops` are what the cursor can stand on: {x, y, tip: () => nodes, text: () => string}.
  function cursor(chart, stops, readout, nearest, home) {
    const { svg } = chart;
    const layer = draw(svg, "g");
    let current = null;
    readout.textContent = stops[home].text();

    function show(index, pointer) {
      current = Math.max(0, Math.min(stops.length - 1, index));
      const stop = stops[current];
      layer.replaceChildren();
      nearest.mark(layer, stop);
      readout.textContent = stop.text();
      const box = svg.getBoundingClientRect();
      const at = pointer ?? { clientX: box.left + (stop.x / chart.width) * box.width, clientY: box.top + (stop.y / chart.height) * box.height };
      showTip(stop.tip(), at.clientX, at.clientY);
    }

    function leave() {
      layer.replaceChildren();
      hideTip();
    }

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * chart.width;
      const y = ((event.clientY - box.top) / box.height) * chart.height;
      show(nearest.find(stops, x, y), event);
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const stride = event.shiftKey ? 10 : 1;
      const moves = {
        ArrowLeft: () => (current ?? home) - stride,
        ArrowRight: () => (current ?? home) + stride,
        Home: () => 0,
        End: () => stops.length - 1,
        p: () => home,
        P: () => home,
        Enter: () => current ?? home,
      };
      if (event.key === "Escape") leave();
      else if (event.key in moves) {
        event.preventDefault();
        show(moves[event.key](), null);
      }
    });
  }

  // -- memory over the step --------------------------------------------------------------------------------------------

  const profiles = Object.entries(data.profiles);
  const totalAt = (profile, point) => profile.bytes.reduce((sum, column) => sum + column[point], 0);
  const used = data.layers.map((_, layer) => profiles.some(([, profile]) => profile.bytes[layer].some((size) => size > 0)));
  const peaks = profiles.map(([, profile]) => totalAt(profile, profile.peak));
  const budgetShown = data.budget !== null && data.budget <= 1.6 * Math.max(...peaks) ? data.budget : 0;
  const highest = 1.14 * Math.max(...peaks, budgetShown);

  function swatch(layer) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 12 12");
    svg.setAttribute("aria-hidden", "true");
    draw(svg, "rect", { width: 12, height: 12, rx: 2, fill: `var(--layer-${layer})` });
    return svg;
  }

  function drawLegend() {
    const planned = data.profiles.planned;
    const legend = document.getElementById("legend");
    data.layers.forEach((name, layer) => {
      if (!used[layer]) return;
      const atPeak = bytesText(planned.bytes[layer][planned.peak]);
      legend.append(make("li", { title: `${name}: ${atPeak} at the planned peak` }, swatch(layer), `${name} `, make("span", { class: "quiet" }, atPeak)));
    });
    legend.append(make("li", { class: "quiet" }, "(bytes at the planned peak)"));
  }

  // Memory does not change between two moments, so areas are steps, not slopes.
  function area(profile, base, top, x, y) {
    const last = profile.at.length - 1;
    let there = "";
    let back = "";
    for (let point = 0; point <= last; point++) {
      const from = x(profile.at[point]);
      const to = x(point < last ? profile.at[point + 1] : profile.moments);
      there += `${point ? "L" : "M"}${from.toFixed(1)},${y(top[point]).toFixed(1)}H${to.toFixed(1)}`;
      const other = last - point;
      const otherFrom = x(profile.at[other]);
      const otherTo = x(other < last ? profile.at[other + 1] : profile.moments);
      back += `L${otherTo.toFixed(1)},${y(base[other]).toFixed(1)}H${otherFrom.toFixed(1)}`;
    }
    return `${there}${back}Z`;
  }

  function drawProfile(name, profile) {
    const figure = document.getElementById(name);
    const total = totalAt(profile, profile.peak);
    const caption = figure.querySelector("figcaption").textContent;
    const overBudget = data.budget === null ? "" : `, budget ${bytesText(data.budget)}`;
    const chart = frame(figure.querySelector(".chart"), `${caption}. Peak ${bytesText(total)}${overBudget}. Arrow keys move through the step.`, {
      x: [0, profile.moments],
      y: [0, highest],
      xText: (value) => value.toLocaleString("en"),
      xTitle: "moment of the step",
      yTitle: "memory held",
    });
    const { svg, plot, x, y } = chart;
    let base = new Array(profile.at.length).fill(0);
    data.layers.forEach((layerName, layer) => {
      if (!used[layer]) return;
      const top = base.map((size, point) => size + profile.bytes[layer][point]);
      draw(svg, "path", { class: "area", "data-layer": layerName, d: area(profile, base, top, x, y), fill: `var(--layer-${layer})` });
      base = top;
    });
    const turn = x(profile.backward);
    draw(svg, "line", { class: "turn", x1: turn, x2: turn, y1: plot.top, y2: plot.bottom });
    const peakX = (x(profile.at[profile.peak]) + x(profile.at[profile.peak + 1] ?? profile.moments)) / 2;
    const peakY = y(total);
    if (data.budget !== null && data.budget <= highest) acrossLine(chart, "budget", data.budget);
    const label = labeller(chart, [[peakX, peakY]]);
    label(`peak ${bytesText(total)}`, "strong peak-label", [[peakX + 9, peakY - 6, "start"], [peakX - 9, peakY - 6, "end"]]);
    budgetLabel(chart, label, data.budget, highest);
    draw(svg, "circle", { class: "peak", cx: peakX, cy: peakY, r: 4.5 });
    label("forward", "phase", [[turn - 6, plot.top + 8, "end"], [turn - 6, plot.bottom - 6, "end"]], true);
    label("backward", "phase", [[turn + 6, plot.top + 8, "start"], [turn + 6, plot.bottom - 6, "start"]], true);

    const stops = profile.at.map((moment, point) => ({
      point,
      x: (x(moment) + x(profile.at[point + 1] ?? profile.moments)) / 2,
      y: y(totalAt(profile, point)),
      text: () => `${point === profile.peak ? "Peak: " : ""}${bytesText(totalAt(profile, point))} at moment ${moment.toLocaleString("en")} of ${profile.moments.toLocaleString("en")}, ${profile.what[point]}`,
      tip: () => profileTip(profile, point),
    }));
    cursor(chart, stops, figure.querySelector(".readout"), {
      find: (all, at) => {
        let low = 0;
        let high = all.length - 1;
        while (low < high) {
          const half = (low + high + 1) >> 1;
          if (x(profile.at[half]) <= at) low = half;
          else high = half - 1;
        }
        return low;
      },
      mark: (layer, stop) => {
        draw(layer, "line", { class: "cursor", x1: stop.x, x2: stop.x, y1: plot.top, y2: plot.bottom });
        draw(layer, "circle", { class: "peak", cx: stop.x, cy: stop.y, r: 3 });
      },
    }, profile.peak);
  }

  function profileTip(profile, point) {
    const body = make("tbody");
    for (let layer = data.layers.length - 1; layer >= 0; layer--) {
      const size = profile.bytes[layer][point];
      if (size) body.append(make("tr", {}, make("th", {}, swatch(layer), ` ${data.layers[layer]}`), make("td", {}, bytesText(size))));
    }
    const whole = make("strong", {}, `${bytesText(totalAt(profile, point))}${point === profile.peak ? " (peak)" : ""}`);
    for (const svg of body.querySelectorAll("svg")) svg.setAttribute("width", "10");
    return [whole, make("div", {}, profile.what[point]), make("table", {}, body)];
  }

  // -- the plans there were ----------------------------------------------------------------------------------------------

  function drawPlans() {
    const figure = document.getElementById("plans");
    const [takenTotal, takenOverhead] = data.taken;
    const points = data.pareto.map(([total, overhead]) => ({ shape: "plan", time: 1 + overhead, total, name: overhead === 0 ? "everything kept, as it would run" : "a plan" }));
    const isTaken = (point) => point.total === takenTotal && Math.abs(point.time - 1 - takenOverhead) < 1e-9;
    const others = points.filter((point) => !isTaken(point));
    const marks = [
      ...others,
      { shape: "taken", time: 1 + takenOverhead, total: takenTotal, name: "this plan" },
      ...data.measured.map((point) => ({ shape: "measured", time: point.seconds_ratio, total: data.resident + point.step_peak, name: point.name, note: "measured" })),
      ...data.peers.map((point) => ({ shape: "peer", time: point.seconds_ratio, total: data.resident + point.step_peak, name: point.name, note: "another system" })),
    ].sort((left, right) => left.time - right.time || right.total - left.total);
    const times = marks.map((mark) => mark.time);
    const totals = [...marks.map((mark) => mark.total), data.before];
    const top = 1.12 * Math.max(...totals, data.budget !== null && data.budget <= 1.6 * Math.max(...totals) ? data.budget : 0);
    const span = Math.max(0.02, Math.max(...times) - Math.min(1, ...times));
    const from = Math.min(1, ...times) - 0.06 * span;
    const to = Math.max(1, ...times) + 0.1 * span;
    const chart = frame(figure.querySelector(".chart"), `Peak against time of ${marks.length} plans and measurements. Arrow keys move from one to the next.`, {
      x: [from, to],
      y: [0, top],
      xText: (value) => shortNumber(Number(value.toFixed(4))),
      xTitle: "time of a step (everything kept = 1)",
      yTitle: "resident + step peak",
    });
    const { svg, x, y } = chart;
    acrossLine(chart, "before", data.before);
    if (data.budget !== null && data.budget <= top) acrossLine(chart, "budget", data.budget);
    if (points.length > 1) {
      const path = points.map((point, place) => (place ? `H${x(point.time).toFixed(1)}V${y(point.total).toFixed(1)}` : `M${x(point.time).toFixed(1)},${y(point.total).toFixed(1)}`));
      draw(svg, "path", { class: "curve", d: path.join("") });
    }
    const order = { plan: 0, peer: 1, measured: 2, taken: 3 };
    for (const mark of [...marks].sort((left, right) => order[left.shape] - order[right.shape])) {
      const at = { x: x(mark.time), y: y(mark.total) };
      const shapes = {
        plan: () => draw(svg, "circle", { class: "plan", cx: at.x, cy: at.y, r: 3 }),
        taken: () => draw(svg, "circle", { class: "taken", cx: at.x, cy: at.y, r: 7 }),
        measured: () => draw(svg, "path", { class: "measured", d: `M${at.x},${at.y - 7}l7,7l-7,7l-7,-7Z` }),
        peer: () => draw(svg, "path", { class: "peer", d: `M${at.x},${at.y - 7}l7,12h-14Z` }),
      };
      shapes[mark.shape]();
    }
    const named = marks.filter((mark) => mark.shape !== "plan");
    const label = labeller(chart, named.map((mark) => [x(mark.time), y(mark.total)]));
    for (const mark of named.sort((left, right) => order[right.shape] - order[left.shape])) {
      const [atX, atY] = [x(mark.time), y(mark.total)];
      // Right above or left below, where the curve does not pass; else wherever there is room.
      const places = [4, 18, -10, 32, -24, 46].flatMap((down) => [[atX + 11, atY + down, "start"], [atX - 11, atY + down, "end"]]);
      label(mark.name, mark.shape === "taken" ? "strong" : "name", [[atX + 7, atY - 9, "start"], [atX - 7, atY + 19, "end"], ...places]);
    }
    acrossLabel(chart, label, `unplanned ${bytesText(data.before)}`, "name", data.before);
    budgetLabel(chart, label, data.budget, top);
    const stops = marks.map((mark) => {
      const told = () => `${mark.name}: ${bytesText(mark.total)}, time ${mark.time.toFixed(3)}${mark.note ? ` (${mark.note})` : ""}`;
      return { x: x(mark.time), y: y(mark.total), text: told, tip: () => [make("strong", {}, mark.name), make("div", {}, bytesText(mark.total)), make("div", {}, `${((mark.time - 1) * 100).toFixed(1)} % ${mark.time < 1 ? "less" : "more"} time${mark.note ? `, ${mark.note}` : ", predicted"}`.replace("-", ""))] };
    });
    cursor(chart, stops, figure.querySelector(".readout"), {
      find: (all, atX, atY) => all.reduce((best, stop, place) => (Math.hypot(stop.x - atX, stop.y - atY) < Math.hypot(all[best].x - atX, all[best].y - atY) ? place : best), 0),
      mark: (layer, stop) => draw(layer, "circle", { class: "ring", cx: stop.x, cy: stop.y, r: 10 }),
    }, marks.findIndex((mark) => mark.shape === "taken"));
  }

  // -- decisions ---------------------------------------------------------------------------------------------------------

  const LISTED = 200;
  const { texts, rows, left_out: leftOut } = data.decisions;
  const text = (number) => texts[number];

  // Long paths may break after a dot or an underscore.
  function path(words) {
    const pieces = words.split(/(?<=[._\]])/);
    return make("span", {}, ...pieces.flatMap((piece, place) => (place ? [document.createElement("wbr"), piece] : [piece])));
  }

  // A column: its title, what it is sorted by, and the content of its cell in a row, and in a row of a single feature map.
  // Adding a column is adding an entry.
  const COLUMNS = [
    { title: "Bytes", number: true, key: (row) => row.bytes * row.count, descending: true, draw: (row) => bytesText(row.bytes * row.count), member: (row) => bytesText(row.bytes) },
    { title: "Count", number: true, key: (row) => row.count, descending: true, draw: countButton },
    { title: "Action", key: (row) => row.action, draw: action },
    { title: "Module", key: (row) => text(row.module), draw: (row) => path(text(row.module)), member: (row, [, module]) => path(text(module)) },
    { title: "Operator", key: (row) => text(row.operator), draw: (row) => path(text(row.operator)), member: (row, [value]) => path(value), memberTitle: "Value" },
    { title: "Shape", tight: true, key: (row) => text(row.shape), draw: (row) => text(row.shape) },
    { title: "Line", tight: true, key: (row) => text(row.source), draw: (row) => text(row.source) },
    { title: "Time", number: true, key: (row) => row.seconds, descending: true, draw: (row) => time(row.seconds), member: (row, [, , seconds]) => time(seconds) },
    { title: "Why", key: (row) => text(row.why), draw: (row) => text(row.why) },
  ];
  const sorting = { column: 0, descending: true };
  const unfolded = new Set();
  let shown = LISTED;
  const body = document.querySelector("#table tbody");
  const search = document.getElementById("search");
  const more = document.getElementById("more");
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  for (const [place, row] of rows.entries()) {
    row.id = place;
    row.words = [row.action, row.code, text(row.module), text(row.operator), text(row.shape), text(row.source), text(row.why), ...row.members.map(([value]) => value)].join("\n").toLowerCase();
  }

  function drawHead() {
    const head = document.querySelector("#table thead tr");
    COLUMNS.forEach((column, place) => {
      const button = make("button", { type: "button" }, column.title);
      button.addEventListener("click", () => {
        if (sorting.column === place) sorting.descending = !sorting.descending;
        else Object.assign(sorting, { column: place, descending: Boolean(column.descending) });
        drawRows();
      });
      head.append(make("th", { scope: "col", role: "columnheader", class: column.number ? "number" : "" }, button));
    });
  }

  function cell(column, content, title) {
    return make("td", { role: "cell", "data-label": title, class: column.number ? "number" : column.tight ? "tight" : "" }, ...(content === "" ? [] : [content]));
  }

  const time = (seconds) => (seconds ? secondsText(seconds) : "");

  function action(row) {
    const as = row.code ? `${row.action} ${row.code}: ${bytesText(row.held * row.count)}` : row.action;
    return make("span", { class: `action ${row.action}` }, as);
  }

  function countButton(row) {
    if (row.count === 1) return "1";
    const open = unfolded.has(row.id);
    const button = make("button", { type: "button", class: "unfold", "aria-expanded": String(open), "aria-label": `${row.count} feature maps, ${open ? "fold" : "unfold"}` }, String(row.count));
    button.addEventListener("click", () => {
      if (open) unfolded.delete(row.id);
      else unfolded.add(row.id);
      drawRows();
      body.querySelector(`[data-row="${row.id}"] .unfold`)?.focus();
    });
    return button;
  }

  function drawRow(row) {
    const found = make("tr", { role: "row", "data-row": row.id }, ...COLUMNS.map((column) => cell(column, column.draw(row), column.title)));
    return unfolded.has(row.id) ? [found, ...members(row)] : [found];
  }

  function members(row) {
    const found = row.members.map((member) => make("tr", { role: "row", class: "member" },
      ...COLUMNS.map((column) => cell(column, column.member ? column.member(row, member) : "", column.memberTitle ?? column.title))));
    const rest = row.count - row.members.length;
    if (rest) found.push(make("tr", { role: "row", class: "member" }, make("td", { role: "cell", colspan: COLUMNS.length }, `and ${rest.toLocaleString("en")} more: to_json() has them all`)));
    return found;
  }

  function drawRows() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = rows.filter((row) => words.every((word) => row.words.includes(word)));
    const { key, number } = COLUMNS[sorting.column];
    const sign = sorting.descending ? -1 : 1;
    matching.sort((left, right) => sign * (number ? key(left) - key(right) : compare(key(left), key(right))) || left.id - right.id);
    body.replaceChildren(...matching.slice(0, shown).flatMap(drawRow));
    document.querySelectorAll("#table th").forEach((head, place) => {
      if (place === sorting.column) head.setAttribute("aria-sort", sorting.descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const maps = matching.reduce((sum, row) => sum + row.count, 0);
    const bytes = matching.reduce((sum, row) => sum + row.count * row.bytes, 0);
    const left = leftOut ? `; ${leftOut.toLocaleString("en")} smaller rows are only in to_json()` : "";
    document.getElementById("found").textContent = `${matching.length} of ${rows.length} rows, ${maps.toLocaleString("en")} feature maps, ${bytesText(bytes)}${left}`;
    more.hidden = matching.length <= shown;
    more.textContent = `Show ${(matching.length - shown).toLocaleString("en")} more rows`;
  }

  // -- all of it ---------------------------------------------------------------------------------------------------------

  function drawCharts() {
    hideTip();
    for (const [name, profile] of profiles) drawProfile(name, profile);
    drawPlans();
  }

  const thinned = profiles.filter(([, profile]) => profile.at.length < profile.moments);
  if (thinned.length) {
    const [, profile] = thinned.at(-1);
    document.getElementById("thinned").textContent = ` The step has ${profile.moments.toLocaleString("en")} moments; drawn are the lowest and the highest of every ${Math.round((2 * profile.moments) / profile.at.length)} or so, and the peak exactly.`;
  }
  drawLegend();
  drawCharts();
  drawHead();
  drawRows();
  search.addEventListener("input", () => {
    shown = LISTED;
    drawRows();
  });
  more.addEventListener("click", () => {
    shown = Infinity;
    drawRows();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    drawCharts();
  });
})();
