"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const { rows: ROWS, texts: TEXTS, facets: FACETS, speeds: SPEEDS, accuracies: ACCURACIES } = DATA;
const $ = (id) => document.getElementById(id);
const SHOWN = 100; // lines of the table at first
const COLOURS = 7;
const SHAPES = [
  "M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0Z", // circle
  "M-4,-4H4V4H-4Z", // square
  "M0,-5.2L5,3.6H-5Z", // triangle
  "M0,-5.6L5.6,0L0,5.6L-5.6,0Z", // diamond
  "M0,5.2L5,-3.6H-5Z", // triangle on its tip
  "M-1.8,-5.4H1.8V-1.8H5.4V1.8H1.8V5.4H-1.8V1.8H-5.4V-1.8H-1.8Z", // plus
  "M-2.6,-5L0,-2.4L2.6,-5L5,-2.6L2.4,0L5,2.6L2.6,5L0,2.4L-2.6,5L-5,2.6L-2.4,0L-5,-2.6Z", // cross
  "M-5,-1.5L0,-5.3L5,-1.5L3.1,4.5H-3.1Z", // pentagon
];
const CELLS = COLOURS * SHAPES.length;

// What a row is called, and how it is drawn: families take colours first, then shapes, the largest family first.
const families = FACETS.find((facet) => facet.key === "family").values;
const look = new Map(families.map((family, at) => [family, at]));
const familyOf = (row) => row.values.family[0];
const kind = (family) => `dot c${look.get(family) % COLOURS}${look.get(family) >= CELLS ? " hollow" : ""}`;
const shape = (family) => SHAPES[Math.floor(look.get(family) / COLOURS) % SHAPES.length];
const named = (row) => (row.tag ? `${row.network}:${row.tag}` : row.network);
const NAMES = new Map(ROWS.map((row, at) => [named(row), at]));
ROWS.forEach((row) => {
  const facts = Object.values(row.facts).map((at) => TEXTS[at]);
  const values = Object.values(row.values).flat().map((at) => TEXTS[at]);
  row.words = [row.network, row.tag, ...values, ...facts].join("\n").toLowerCase();
});

const escaped = (text) => String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const figure = (value, digits = 3) => {
  if (value === null || value === undefined) return "";
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
};

// The axes: how each is called, and its value for a row or null.
const speedAt = (at) => (row) => {
  const known = SPEEDS[at].rates[row.network];
  return known && known[0] === row.side ? known[1] : null;
};
const COSTS = [
  { key: "gmacs", label: "GMACs for one image", short: "GMACs", of: (row) => row.gmacs, about: (row) => row.scaled },
  { key: "params", label: "Parameters, millions", short: "parameters, millions", of: (row) => row.params / 1e6 || null },
  { key: "mb", label: "Size of the file, MB", short: "MB", of: (row) => row.mb, about: (row) => row.guess },
];
const AXES = [
  ...SPEEDS.map((one, at) => ({ key: `speed${at}`, label: `Images/s, ${one.label}`, short: "images/s", of: speedAt(at), speed: at })),
  ...COSTS,
];
const accuracyAt = (at) => (row) => {
  const one = ACCURACIES[at];
  const value = row.on === one.on ? row.metrics[one.metric] : undefined;
  return value === undefined ? null : value;
};

const state = { chosen: new Map(), words: [], x: 0, y: 0, speed: 0, sort: "accuracy", down: true, lines: SHOWN, card: [], kept: null, from: null };
let found = ROWS.map((_, at) => at);
let placed = []; // of the chart: {at, x, y}, by x

// Filters. Values of one facet are alternatives, facets and words all have to be met.
const takes = (row, facet) => {
  const wanted = state.chosen.get(facet.key);
  return !wanted || wanted.size === 0 || row.values[facet.key].some((value) => wanted.has(value));
};
const filter = () => {
  const counts = FACETS.map(() => new Map());
  found = [];
  ROWS.forEach((row, at) => {
    if (!state.words.every((word) => row.words.includes(word))) return;
    const missed = FACETS.filter((facet) => !takes(row, facet));
    if (missed.length === 0) found.push(at);
    if (missed.length > 1) return;
    FACETS.forEach((facet, number) => {
      if (missed.length && missed[0] !== facet) return; // a count is of what ticking would give
      row.values[facet.key].forEach((value) => counts[number].set(value, (counts[number].get(value) || 0) + 1));
    });
  });
  document.querySelectorAll("#facets input").forEach((box) => {
    const count = counts[Number(box.dataset.facet)].get(Number(box.value)) || 0;
    box.closest("label").querySelector("output").textContent = count;
    box.closest("li").classList.toggle("none", count === 0);
  });
  const active = [...state.chosen.values()].filter((wanted) => wanted.size).length;
  $("active").textContent = active ? `(${active} in use)` : "";
};

// The chart.
const ticks = (low, high, log) => {
  const many = 8;
  if (!log) {
    const rough = (high - low) / many;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, at) => Number(((first + at) * step).toPrecision(12)));
  }
  const decades = Array.from({ length: 20 }, (_, at) => 10 ** (at - 6));
  for (const parts of [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1, 3], [1]]) {
    const all = decades.flatMap((decade) => parts.map((part) => Number((part * decade).toPrecision(3))));
    const inside = all.filter((tick) => tick >= low && tick <= high);
    if (inside.length <= many + 2 || parts.length === 1) return inside;
  }
  return [];
};
const front = (better) => {
  const order = [...placed].sort((one, other) => (better * (other.vx - one.vx)) || other.vy - one.vy);
  const best = [];
  order.forEach((one) => {
    if (best.length === 0 || one.vy > best[best.length - 1].vy) best.push(one);
  });
  return best;
};
const draw = () => {
  const axis = AXES[state.x];
  const accuracy = accuracyAt(state.y);
  const wide = Math.max(320, $("chart").clientWidth || 900);
  const high = wide < 600 ? 400 : 500;
  const [left, right, top, bottom] = [52, 16, 12, 46];
  placed = found.map((at) => ({ at, vx: axis.of(ROWS[at]), vy: accuracy(ROWS[at]) })).filter((one) => one.vx !== null && one.vy !== null);
  const without = found.filter((at) => accuracy(ROWS[at]) === null).length;
  const slow = found.length - placed.length - without;
  const reasons = [];
  if (without) reasons.push(`${without.toLocaleString("en")} without this accuracy`);
  if (slow) reasons.push(`${slow.toLocaleString("en")} without ${axis.speed === undefined ? "this figure" : "this measurement at their image size"}`);
  const rest = reasons.length ? `; not on it: ${reasons.join(", ")}` : "";
  $("status").textContent =
    `${found.length.toLocaleString("en")} of ${ROWS.length.toLocaleString("en")} rows match. ` + `${placed.length.toLocaleString("en")} are on the chart${rest}.`;
  caption(axis);
  if (placed.length === 0) {
    $("chart").innerHTML = `<svg viewBox="0 0 ${wide} 120" role="img" aria-label="No point to show"><text class="empty" x="50%" y="60" text-anchor="middle">No point to show: clear a filter, or choose other axes.</text></svg>`;
    return;
  }
  const xs = placed.map((one) => one.vx);
  const ys = placed.map((one) => one.vy);
  const widen = (values, log) => {
    const [low, up] = [Math.min(...values), Math.max(...values)];
    if (log) return [low / 1.15, up * 1.15];
    const room = Math.max((up - low) * 0.05, 0.5);
    return [low - room, up + room];
  };
  const [x0, x1] = widen(xs, true);
  const [y0, y1] = widen(ys, false);
  const px = (value) => left + ((Math.log(value) - Math.log(x0)) / (Math.log(x1) - Math.log(x0))) * (wide - left - right);
  const py = (value) => high - bottom - ((value - y0) / (y1 - y0)) * (high - top - bottom);
  placed.forEach((one) => Object.assign(one, { x: px(one.vx), y: py(one.vy) }));
  placed.sort((one, other) => one.x - other.x || one.y - other.y);
  const parts = [];
  ticks(x0, x1, true).forEach((tick) => {
    const x = px(tick).toFixed(1);
    parts.push(`<line class="grid" x1="${x}" x2="${x}" y1="${top}" y2="${high - bottom}"/><text x="${x}" y="${high - bottom + 18}" text-anchor="middle">${figure(tick)}</text>`);
  });
  ticks(y0, y1, false).forEach((tick) => {
    const y = py(tick).toFixed(1);
    parts.push(`<line class="grid" x1="${left}" x2="${wide - right}" y1="${y}" y2="${y}"/><text x="${left - 8}" y="${Number(y) + 4}" text-anchor="end">${figure(tick)}</text>`);
  });
  const faster = axis.speed !== undefined;
  const words = `${axis.short}, ${faster ? "faster" : "smaller"} is ${faster ? "right" : "left"}`;
  parts.push(`<text x="${(left + wide - right) / 2}" y="${high - 8}" text-anchor="middle">${escaped(words)}</text>`);
  parts.push(`<text transform="translate(13,${(top + high - bottom) / 2}) rotate(-90)" text-anchor="middle">${escaped(ACCURACIES[state.y].label.split(",")[0])}</text>`);
  const best = front(faster ? 1 : -1);
  if (best.length > 1) parts.push(`<polyline class="front" points="${best.map((one) => `${one.x.toFixed(1)},${one.y.toFixed(1)}`).join(" ")}"/>`);
  const tab = placed.some((one) => one.at === state.card[state.card.length - 1]) ? state.card[state.card.length - 1] : placed[0].at;
  placed.forEach((one) => {
    const row = ROWS[one.at];
    const at = `translate(${one.x.toFixed(1)},${one.y.toFixed(1)})`;
    if (DATA.mine && row.here) parts.push(`<circle class="here" r="8" transform="${at}"/>`);
    const chosen = state.card.includes(one.at) ? " chosen" : "";
    parts.push(`<path class="point ${kind(familyOf(row))}${chosen}" d="${shape(familyOf(row))}" transform="${at}" data-at="${one.at}" role="button" tabindex="${one.at === tab ? 0 : -1}" aria-label="${escaped(says(one))}"/>`);
  });
  parts.push(labels(best, left, wide - right, top, faster));
  const about = `${placed.length} checkpoints, ${ACCURACIES[state.y].label} against ${axis.label}. The table below has the same figures.`;
  $("chart").innerHTML = `<svg viewBox="0 0 ${wide} ${high}" role="group" aria-label="${escaped(about)}">${parts.join("")}</svg><div id="tip" hidden></div>`;
};
const says = (one) => {
  const axis = AXES[state.x];
  const about = axis.about && axis.about(ROWS[one.at]) ? "about " : "";
  return `${named(ROWS[one.at])}: ${figure(one.vy, 4)} ${ACCURACIES[state.y].label.split(",")[0]}, ${about}${figure(one.vx)} ${axis.short}`;
};
const labels = (best, left, right, top, faster) => {
  const taken = [];
  return [...best].reverse().map((one) => {
    const name = ROWS[one.at].network;
    const wide = name.length * 7 + 4;
    const y = one.y - 9 < top + 8 ? one.y + 18 : one.y - 9;
    const x = faster ? Math.min(one.x + 4, right - wide) : Math.max(one.x - wide, left); // the side on which no point is
    if (taken.some((box) => x < box.x + box.wide && box.x < x + wide && Math.abs(box.y - y) < 15)) return "";
    taken.push({ x, y, wide });
    return `<text class="name" aria-hidden="true" x="${x.toFixed(1)}" y="${y.toFixed(1)}">${escaped(name)}</text>`;
  }).join("");
};
const caption = (axis) => {
  const parts = [];
  if (axis.speed !== undefined) {
    const one = SPEEDS[axis.speed];
    const whose = one.mine ? "Measured by you" : "Measured";
    parts.push(`${whose} on ${one.machine}, ${[one.when, one.versions].filter(Boolean).join(", ")}. A figure holds for images of the size that was timed; a checkpoint for another size has none.`);
  }
  if (axis.key === "gmacs") parts.push("GMACs: 10⁹ multiply-adds for one image. At another size than the network's own they are scaled by the image's area, and the card says so.");
  if (axis.key === "mb") parts.push("Where nobody states the size of a file, it is that of the parameters in float32.");
  parts.push("The dashed line joins the checkpoints that no other one beats in both.");
  if (DATA.mine) parts.push("A ring marks what this machine has.");
  $("caption").textContent = parts.join(" ");
};
const tip = (point) => {
  const box = $("tip");
  const one = point && placed.find((other) => other.at === Number(point.dataset.at));
  if (!box) return;
  box.hidden = !one;
  if (!one) return;
  const row = ROWS[one.at];
  box.textContent = `${says(one)}\n${TEXTS[familyOf(row)]}, ${row.side} px, ${TEXTS[row.values.license[0]]}`;
  const svg = $("chart").querySelector("svg");
  const scale = svg.clientWidth / svg.viewBox.baseVal.width;
  box.style.left = `${Math.max(0, Math.min(one.x * scale + 12, svg.clientWidth - box.offsetWidth))}px`;
  box.style.top = `${one.y * scale + (one.y * scale > svg.clientHeight / 2 ? -box.offsetHeight - 10 : 12)}px`;
};
const step = (point, key) => {
  const byY = [...placed].sort((one, other) => other.y - one.y || one.x - other.x);
  const order = key === "ArrowUp" || key === "ArrowDown" ? byY : placed;
  const here = order.findIndex((one) => one.at === Number(point.dataset.at));
  const to = { ArrowLeft: here - 1, ArrowDown: here - 1, ArrowRight: here + 1, ArrowUp: here + 1, Home: 0, End: order.length - 1 }[key];
  if (to === undefined || !order[to]) return;
  point.tabIndex = -1;
  const next = $("chart").querySelector(`[data-at="${order[to].at}"]`);
  next.tabIndex = 0;
  next.focus();
};

// The table.
const COLUMNS = [
  { key: "network", label: () => "network", of: (row) => row.network },
  { key: "tag", label: () => "checkpoint", of: (row) => row.tag },
  { key: "accuracy", label: () => ACCURACIES[state.y].label.split(",")[0], of: (row) => accuracyAt(state.y)(row), digits: 4, down: true },
  ...(SPEEDS.length ? [{ key: "speed", label: () => "images/s", of: (row) => speedAt(state.speed)(row), digits: 4, down: true }] : []),
  { key: "params", label: () => "params, M", of: (row) => row.params / 1e6 || null, digits: 3 },
  { key: "gmacs", label: () => "GMACs", of: (row) => row.gmacs, about: (row) => row.scaled, digits: 3 },
  { key: "mb", label: () => "MB", of: (row) => row.mb, about: (row) => row.guess, digits: 3 },
  { key: "side", label: () => "px", of: (row) => row.side, digits: 4 },
  { key: "license", label: () => "licence", of: (row) => TEXTS[row.values.license[0]] },
  { key: "on", label: () => "measured on", of: (row) => row.on },
  { key: "hash", label: () => "hash", of: (row) => TEXTS[row.values.hash[0]] },
  ...(DATA.mine ? [{ key: "here", label: () => "here", of: (row) => row.here }] : []),
];
const order = () => {
  const column = COLUMNS.find((one) => one.key === state.sort);
  const turn = state.down ? -1 : 1;
  const value = found.map((at) => [at, column.of(ROWS[at])]);
  const empty = (one) => one === null || one === "";
  const compare = column.digits ? (one, other) => one - other : new Intl.Collator("en", { numeric: true }).compare;
  value.sort(([a, one], [b, other]) => empty(one) - empty(other) || (empty(one) ? 0 : turn * compare(one, other)) || a - b);
  return value.map(([at]) => at);
};
const head = () => {
  $("table").innerHTML = `<table><caption class="hidden">Every checkpoint that the filters leave</caption><thead><tr>${COLUMNS.map(
    (column) => `<th scope="col" data-key="${column.key}"${column.digits ? ' class="right"' : ""}><button type="button"></button></th>`,
  ).join("")}</tr></thead><tbody></tbody></table>`;
};
const lines = () => {
  document.querySelectorAll("#table th").forEach((cell, at) => {
    const sorted = COLUMNS[at].key === state.sort;
    cell.querySelector("button").textContent = COLUMNS[at].label();
    if (sorted) cell.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
  const all = order();
  const cells = (row, at) =>
    COLUMNS.map((column) => {
      const value = column.of(row);
      if (column.key === "network") return `<td><button type="button" data-at="${at}" aria-label="${escaped(named(row))}">${escaped(value)}</button></td>`;
      if (!column.digits) return `<td>${escaped(value)}</td>`;
      return `<td class="right">${value !== null && column.about && column.about(row) ? "~" : ""}${figure(value, column.digits)}</td>`;
    }).join("");
  const html = all.slice(0, state.lines).map((at) => `<tr${state.card.includes(at) ? ' class="chosen"' : ""}>${cells(ROWS[at], at)}</tr>`);
  $("table").querySelector("tbody").innerHTML = html.join("") || `<tr><td colspan="${COLUMNS.length}">No checkpoint meets all of these filters.</td></tr>`;
  const rest = all.length - state.lines;
  $("more").hidden = $("all").hidden = rest <= 0;
  $("more").textContent = `Show ${Math.min(rest, SHOWN)} more`;
  $("all").textContent = `Show all ${all.length.toLocaleString("en")}`;
};

// The card: one checkpoint, or two side by side.
const linked = (text) => {
  const paths = escaped(text).replace(/hf:\/\/([\w.-]+\/[\w.-]+)/g, (whole, repository) => `<a href="https://huggingface.co/${repository}" rel="noreferrer">${whole}</a>`);
  return paths.replace(/(^|\s)(https:\/\/[^\s<&]+)/g, (_, before, url) => `${before}<a href="${url}" rel="noreferrer">${url}</a>`);
};
const copied = (text, what) => (text ? `<pre>${escaped(text)}</pre><button type="button" class="copy" data-copy="${escaped(text)}" aria-label="Copy ${escaped(what)}">Copy</button>` : "");
const entries = (row) => {
  const name = named(row);
  const speeds = SPEEDS.map((one, at) => [one, speedAt(at)(row)]).filter(([, value]) => value !== null);
  const facts = Object.fromEntries(Object.entries(row.facts).map(([key, at]) => [key, TEXTS[at]]));
  const whole = /^[0-9a-f]{64}/.exec(facts.sha256 || "");
  const { accuracy, licence, preprocessing, sources, sha256, network, ...others } = facts;
  const fact = (key, text) => [key, text || "", text ? linked(text) : ""];
  const machines = new Map(); // what one machine measured alike stands in a line
  speeds.forEach(([one, value]) => {
    const how = `${one.machine}, ${one.how}${one.mine ? ", measured by you" : ""}`;
    machines.set(how, [...(machines.get(how) || []), [one, value]]);
  });
  const speed = ([how, found]) => {
    const rates = found.map(([one, value]) => `${figure(value, 4)} images/s at batch ${one.batch}`).join(", ");
    const days = [...new Set(found.map(([one]) => [one.when, one.versions].filter(Boolean).join(", ")))].join("; ");
    return `${escaped(how)}: ${rates} <small>(${escaped(days)})</small>`;
  };
  const hash = whole ? copied(whole[0], `the SHA-256 of ${name}`) + linked(sha256.slice(64)) : linked(sha256 || "");
  const paper = TEXTS[row.paper] ? ` <a href="${escaped(TEXTS[row.paper])}" rel="noreferrer">Paper</a>` : "";
  return [
    ["Python", row.code, copied(row.code, `the Python lines of ${name}`)],
    ["command", row.command, copied(row.command, `the command of ${name}`)],
    ...(DATA.mine ? [["here", row.here, escaped(row.here || "nothing")]] : []),
    fact("accuracy", accuracy),
    ["speed", JSON.stringify(speeds), [...machines].map(speed).join("\n")],
    ["GMACs", String(row.gmacs), row.gmacs === null ? "" : `${figure(row.gmacs)} for ${row.side} x ${row.side} px${row.scaled ? ", scaled by area from the network's own size" : ""}`],
    ["file", String(row.mb), `${figure(row.mb)} MB${row.guess ? ", as the parameters in float32: nobody states its size" : ""}`],
    fact("licence", licence),
    fact("preprocessing", preprocessing),
    fact("sources", sources),
    ["sha256", sha256 || "", hash],
    ...Object.entries(others).map(([key, text]) => fact(key, text)),
    ["network", `${network} ${paper}`, `${escaped(TEXTS[familyOf(row)])}. ${escaped(network || "")}${paper}`],
  ];
};
const card = () => {
  const box = $("card");
  box.hidden = state.card.length === 0;
  document.querySelectorAll(".point.chosen, tr.chosen").forEach((one) => one.classList.remove("chosen"));
  if (box.hidden) return;
  const rows = state.card.map((at) => ROWS[at]);
  const sides = rows.map(entries);
  const keys = [...new Set(sides.flatMap((side) => side.map(([key]) => key)))];
  const body = keys.map((key) => {
    const cells = sides.map((side) => side.find(([other]) => other === key) || [key, "", ""]);
    if (cells.every(([, , html]) => html === "")) return "";
    const differs = cells.length > 1 && cells[0][1] !== cells[1][1] && key !== "Python" && key !== "command";
    return `<tr${differs ? ' class="differs"' : ""}><th scope="row">${key}${differs ? '<span class="hidden"> differs</span>' : ""}</th>${cells.map(([, , html], at) => `<td${rows.length > 1 ? ` data-of="${escaped(named(rows[at]))}"` : ""}>${html || "-"}</td>`).join("")}</tr>`;
  });
  const keep = state.kept === null ? "Compare with another" : "Stop comparing";
  const hint = state.kept !== null && rows.length === 1 ? "<p>Now choose another point or row: it comes beside this one.</p>" : "";
  const heads = rows.length > 1 ? `<thead><tr><td class="first"></td>${rows.map((row) => `<th scope="col">${escaped(named(row))}</th>`).join("")}</tr></thead>` : "";
  box.innerHTML = `<div class="bar"><h2 id="card-title">${rows.map((row) => escaped(named(row))).join(" and ")}</h2><button type="button" id="keep" aria-pressed="${state.kept !== null}">${keep}</button><button type="button" id="close">Close</button></div>${hint}<table>${heads}<tbody>${body.join("")}</tbody></table>`;
  state.card.forEach((at) => {
    document.querySelectorAll(`[data-at="${at}"]`).forEach((one) => (one.closest("tr") || one).classList.add("chosen"));
  });
};
const choose = (at, from) => {
  state.from = from;
  state.card = state.kept !== null && state.kept !== at ? [state.kept, at] : [at];
  card();
  try { history.replaceState(null, "", `#${encodeURIComponent(named(ROWS[at]))}`); } catch { /* a viewer without addresses */ }
  $("card").focus({ preventScroll: true });
  $("card").scrollIntoView({ block: "nearest" });
};
const close = () => {
  const last = state.card[state.card.length - 1];
  Object.assign(state, { card: [], kept: null });
  card();
  const back = $(state.from || "chart").querySelector(`[data-at="${last}"]`);
  if (back) back.focus();
};
const say = (text) => { $("said").textContent = text; };
const copy = async (button) => {
  const text = button.dataset.copy;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not given to this page: the older way
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  say(done ? "Copied" : "The browser does not let this page copy: select the text");
  button.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
};

// What the reader does.
const update = () => { filter(); draw(); lines(); };
const again = () => { state.lines = SHOWN; update(); };
const options = () => {
  $("y").innerHTML = ACCURACIES.map((one, at) => `<option value="${at}">${escaped(one.label)}</option>`).join("");
  const groups = [...new Set(SPEEDS.map((one) => (one.mine ? "Measured by you" : one.machine)))];
  const option = (axis, at) => `<option value="${at}">${escaped(axis.label)}</option>`;
  const of = (group) => AXES.map((axis, at) => (axis.speed !== undefined && (SPEEDS[axis.speed].mine ? "Measured by you" : SPEEDS[axis.speed].machine) === group ? option(axis, at) : "")).join("");
  const costs = AXES.map((axis, at) => (axis.speed === undefined ? option(axis, at) : "")).join("");
  $("x").innerHTML = `${groups.map((group) => `<optgroup label="${escaped(group)}">${of(group)}</optgroup>`).join("")}<optgroup label="Cost">${costs}</optgroup>`;
  const points = (at) => ROWS.filter((row) => speedAt(at)(row) !== null && accuracyAt(state.y)(row) !== null).length;
  const counts = SPEEDS.map((_, at) => points(at));
  const mine = SPEEDS.findIndex((one, at) => one.mine && counts[at]);
  const most = counts.indexOf(Math.max(...counts));
  state.x = mine >= 0 ? mine : most >= 0 ? most : AXES.length - COSTS.length;
  state.speed = Math.max(0, mine >= 0 ? mine : most);
  $("x").value = state.x;
};
const boxes = () => {
  $("facets").innerHTML = FACETS.map((facet, number) => {
    const items = facet.values.map((value) => {
      const sign = facet.key === "family" ? `<svg viewBox="-8 -8 16 16" aria-hidden="true"><path class="${kind(value)}" d="${shape(value)}"/></svg>` : "";
      return `<li><label><input type="checkbox" data-facet="${number}" value="${value}">${sign}<span>${escaped(TEXTS[value])}</span><output></output></label></li>`;
    });
    return `<details class="facet"${facet.open ? " open" : ""}><summary>${escaped(facet.label)}</summary><fieldset><legend class="hidden">${escaped(facet.label)}</legend><ul>${items.join("")}</ul></fieldset></details>`;
  }).join("");
};
const listen = () => {
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("reset", () => { state.chosen.clear(); state.words = []; again(); });
  $("facets").addEventListener("change", ({ target }) => {
    const { key } = FACETS[Number(target.dataset.facet)];
    const wanted = state.chosen.get(key) || new Set();
    if (target.checked) wanted.add(Number(target.value));
    else wanted.delete(Number(target.value));
    state.chosen.set(key, wanted);
    again();
  });
  $("search").addEventListener("input", ({ target }) => { state.words = target.value.toLowerCase().split(/\s+/).filter(Boolean); again(); });
  $("y").addEventListener("change", ({ target }) => { state.y = Number(target.value); update(); });
  $("x").addEventListener("change", ({ target }) => {
    state.x = Number(target.value);
    if (AXES[state.x].speed !== undefined) state.speed = AXES[state.x].speed;
    update();
  });
  const chart = $("chart");
  const point = (event) => event.target.closest(".point");
  chart.addEventListener("click", (event) => point(event) && choose(Number(point(event).dataset.at), "chart"));
  chart.addEventListener("pointerover", (event) => tip(point(event)));
  chart.addEventListener("pointerleave", () => tip(null));
  chart.addEventListener("focusin", (event) => tip(point(event)));
  chart.addEventListener("focusout", () => tip(null));
  chart.addEventListener("keydown", (event) => {
    const here = point(event);
    if (!here) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(Number(here.dataset.at), "chart"); return; }
    if (/^(Arrow|Home|End)/.test(event.key)) { event.preventDefault(); step(here, event.key); }
  });
  $("table").addEventListener("click", ({ target }) => {
    const column = target.closest("th");
    if (column) {
      const known = COLUMNS.find((one) => one.key === column.dataset.key);
      state.down = state.sort === known.key ? !state.down : Boolean(known.down);
      state.sort = known.key;
      lines();
      return;
    }
    const line = target.closest("tbody tr");
    const button = line && line.querySelector("[data-at]");
    if (button && String(getSelection()) === "") choose(Number(button.dataset.at), "table");
  });
  $("more").addEventListener("click", () => { state.lines += SHOWN; lines(); });
  $("all").addEventListener("click", () => { state.lines = ROWS.length; lines(); });
  $("card").addEventListener("click", ({ target }) => {
    if (target.id === "close") close();
    else if (target.id === "keep") {
      const last = state.card[state.card.length - 1];
      if (state.kept !== null) state.card = [last];
      state.kept = state.kept === null ? last : null;
      card();
      $("keep").focus();
    } else if (target.dataset.copy) copy(target);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.card.length && event.target.id !== "search") close();
    if (event.key === "/" && !/INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) { event.preventDefault(); $("search").focus(); }
  });
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; requestAnimationFrame(draw); } });
  addEventListener("hashchange", opened);
};
const opened = () => {
  let name = "";
  try { name = decodeURIComponent(location.hash.slice(1)); } catch { /* no name of ours */ }
  if (NAMES.has(name)) choose(NAMES.get(name), "table");
};

if (matchMedia("(max-width: 820px)").matches) $("fold").open = false;
ROWS.forEach((row) => {
  const nothing = (at) => TEXTS[at] === "nothing";
  row.here = row.values.here && !row.values.here.some(nothing) ? row.values.here.map((at) => TEXTS[at]).join(", ") : "";
});
options();
boxes();
head();
listen();
update();
opened();
performance.mark("ready");
