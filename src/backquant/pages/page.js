"use strict";
const byId = id => document.getElementById(id);
const { details, kin, first, size: boxSize } = JSON.parse(byId("data").textContent);
const canvas = byId("canvas"), view = byId("view"), overview = mark("svg", { id: "overview", preserveAspectRatio: "none", "aria-hidden": true });
const size = { w: +canvas.getAttribute("width"), h: +canvas.getAttribute("height") };
canvas.removeAttribute("width"); canvas.removeAttribute("height"); canvas.parentNode.append(overview);
let scale = 1, tx = 0, ty = 0, frame = null;
function draw() {
  view.setAttribute("transform", `translate(${tx},${ty}) scale(${scale})`);
  if (frame) {
    const area = canvas.getBoundingClientRect();
    frame.setAttribute("y", -ty / scale); frame.setAttribute("height", area.height / scale);
  }
}
function fit() {
  const area = canvas.getBoundingClientRect(), wide = (area.width - 40) / Math.max(size.w, 1), high = (area.height - 40) / Math.max(size.h, 1);
  const whole = Math.min(1.15, wide, high);
  scale = whole >= .55 ? whole : Math.min(1.05, Math.max(.35, wide));
  tx = (area.width - size.w * scale) / 2; ty = whole >= .55 ? (area.height - size.h * scale) / 2 : 20; draw();
}
function zoom(factor, x, y) {
  const next = Math.min(4, Math.max(.04, scale * factor));
  tx = x - (x - tx) * next / scale; ty = y - (y - ty) * next / scale; scale = next; draw();
}
function centred(factor) { const area = canvas.getBoundingClientRect(); zoom(factor, area.width / 2, area.height / 2); }
canvas.addEventListener("wheel", event => {
  event.preventDefault();
  const area = canvas.getBoundingClientRect();
  zoom(Math.exp(-event.deltaY * .0015), event.clientX - area.left, event.clientY - area.top);
}, { passive: false });
function button(text, label, act) {
  const item = document.createElement("button");
  item.textContent = text; item.ariaLabel = label; item.addEventListener("click", act); return item;
}
const zooms = document.createElement("span");
zooms.className = "end";
zooms.append(button("−", "zoom out", () => centred(1 / 1.3)), button("+", "zoom in", () => centred(1.3)), button("fit", "fit", fit));
document.querySelector(".legend").append(zooms);
let drag = null;
canvas.addEventListener("pointerdown", event => { drag = { x: event.clientX - tx, y: event.clientY - ty, moved: false }; });
window.addEventListener("pointermove", event => {
  if (!drag) return;
  const nx = event.clientX - drag.x, ny = event.clientY - drag.y;
  if (Math.abs(nx - tx) + Math.abs(ny - ty) > 3) drag.moved = true;
  if (drag.moved) { tx = nx; ty = ny; draw(); }
});
window.addEventListener("pointerup", () => { setTimeout(() => { drag = null; }, 0); });
const boxes = new Map([...document.querySelectorAll(".box")].map(box => [box.dataset.node, box]));
const rows = new Map([...document.querySelectorAll("tr[data-node]")].map(row => [row.dataset.node, row]));
const edges = [...document.querySelectorAll(".edge")];
const place = box => box.transform.baseVal[0].matrix;
function choose(node, centre) {
  if (!boxes.has(node)) return;
  document.querySelectorAll(".chosen, .kin, .lit").forEach(item => item.classList.remove("chosen", "kin", "lit"));
  const box = boxes.get(node);
  box.classList.add("chosen"); rows.get(node)?.classList.add("chosen");
  for (const other of kin[node] || []) if (boxes.has(other)) boxes.get(other).classList.add("kin");
  for (const edge of edges) if (edge.dataset.from === node || edge.dataset.to === node) edge.classList.add("lit");
  const title = document.createElement("h3"), list = document.createElement("dl");
  title.textContent = node;
  for (const [label, text] of details[node]) {
    const dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = label; dd.textContent = text;
    if (label === "fix") dd.className = "fix";
    if (label === "why float") dt.className = dd.className = "why";
    list.append(dt, dd);
  }
  byId("detail").replaceChildren(title, list);
  if (centre) {
    const at = place(box), area = canvas.getBoundingClientRect();
    scale = Math.max(scale, .7);
    tx = area.width / 2 - (at.e + boxSize.width / 2) * scale; ty = area.height / 2 - (at.f + boxSize.height / 2) * scale; draw();
  }
}
boxes.forEach((box, node) => box.addEventListener("click", () => { if (!drag || !drag.moved) choose(node, false); }));
function jump(node) { choose(node, true); canvas.scrollIntoView({ behavior: "smooth", block: "center" }); }
rows.forEach((row, node) => row.addEventListener("click", () => jump(node)));
document.querySelectorAll("a.node").forEach(link => link.addEventListener("click", () => jump(link.dataset.node)));
function mark(name, attributes) {
  const item = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) item.setAttribute(key, attributes[key]);
  return item;
}
function drawOverview() {
  if (size.h < 2400) return;
  overview.style.display = "block";
  overview.setAttribute("viewBox", `0 0 ${size.w} ${size.h}`);
  const height = Math.max(boxSize.height, size.h / 300);
  boxes.forEach(box => { const at = place(box); overview.append(mark("rect", { x: at.e, y: at.f, width: boxSize.width, height, class: box.classList[1] || "plain" })); });
  frame = mark("rect", { x: 0, y: 0, width: size.w, height: 10, class: "frame" });
  overview.append(frame);
  const go = event => {
    const area = overview.getBoundingClientRect(), here = canvas.getBoundingClientRect();
    ty = here.height / 2 - (event.clientY - area.top) / area.height * size.h * scale; draw();
  };
  overview.addEventListener("pointerdown", event => { overview.setPointerCapture(event.pointerId); go(event); });
  overview.addEventListener("pointermove", event => { if (event.buttons) go(event); });
}
function filtered(table) {
  const own = [...table.querySelectorAll("tr[data-node]")], states = [...new Set(own.map(row => row.dataset.state).filter(Boolean))];
  const tools = document.createElement("div"), search = document.createElement("input"), count = document.createElement("span");
  const shown = new Set(states);
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean); let number = 0;
    for (const row of own) {
      const text = row.textContent.toLowerCase();
      row.hidden = (states.length && !shown.has(row.dataset.state)) || !words.every(word => text.includes(word));
      number += !row.hidden;
    }
    count.textContent = `${number} of ${own.length}`;
  }
  tools.className = "tools"; count.className = "soft";
  search.type = "search"; search.placeholder = search.ariaLabel = "filter: name, operator, entry, kernel";
  search.addEventListener("input", filter);
  tools.append(search);
  for (const state of states) {
    const toggle = button(state, `show ${state}`, () => {
      shown.has(state) ? shown.delete(state) : shown.add(state);
      toggle.setAttribute("aria-pressed", shown.has(state)); filter();
    });
    toggle.setAttribute("aria-pressed", true); tools.append(toggle);
  }
  tools.append(count); table.closest(".panel").before(tools); filter();
}
document.querySelectorAll("table").forEach(table => { if (table.querySelector("tr[data-node]")) filtered(table); });
drawOverview();
window.addEventListener("resize", fit); fit();
if (first !== null) choose(first, false);
