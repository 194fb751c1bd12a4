const chart = document.querySelector(".chart"), scroll = chart.querySelector(".scroll"), svg = scroll.querySelector("svg");
const tip = chart.querySelector(".tip"), axis = document.getElementById("axis"), numbers = [...svg.querySelectorAll("text[data-share]")];
const SPACE = svg.namespaceURI;
let zoom = 1, hot = [];

function readable(seconds) {
  const value = seconds * data.perSecond;
  return value.toFixed(Math.abs(value) < 100 ? 2 : 1) + " " + data.unit;
}

function element(name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function layout() {
  svg.style.width = 100 * zoom + "%";
  const width = svg.getBoundingClientRect().width, whole = data.until * data.perSecond;
  for (const text of numbers) text.style.display = text.dataset.share * width > 7 * text.textContent.length + 3 ? "" : "none";
  const rough = whole * 90 / width, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough);
  axis.replaceChildren();
  for (let count = 0; count * step <= whole; count += 1) {
    const x = 100 * count * step / whole + "%";
    axis.append(element("line", { x1: x, x2: x, y1: data.axis, y2: data.axis + 5 }));
    const anchor = count ? "middle" : "start";
    const label = parseFloat((count * step).toPrecision(6)) + (count ? "" : " " + data.unit);
    axis.append(element("text", { x, y: data.axis + 18, style: `text-anchor: ${anchor}` }, label));
  }
}

function line(table, left, right) {
  const row = table.insertRow();
  row.insertCell().textContent = left;
  row.insertCell().textContent = right;
}

function found(row, time, low) {
  const inside = row.boxes.map((box, index) => [box, index]).filter(([box]) => box[3] <= time && time < box[4]);
  return inside.find(([box]) => box[8] === 0 || (box[8] === 2) === low);
}

function show(event) {
  const box = svg.getBoundingClientRect(), time = (event.clientX - box.left) / box.width * data.until, y = event.clientY - box.top;
  const row = data.rows.find(({ top, height }) => y >= top && y < top + height);
  hide();
  if (!row) return;
  const [action, index] = found(row, time, y > row.top + row.height / 2) || [];
  const table = document.createElement("table");
  if (action) {
    const [kind, stage, microbatch, start, end, live, peer, bytes] = action;
    line(table, data.words[kind], `stage ${stage}, microbatch ${microbatch}`);
    line(table, "start", readable(start));
    line(table, "duration", readable(end - start));
    if (peer !== null) line(table, kind === "send" ? "to" : "from", `rank ${peer}, ${bytes.toLocaleString("en")} bytes`);
    if (live !== null) line(table, "live activations after it", live);
    for (const [number, other] of data.rows.entries()) {
      const same = other.boxes.findIndex(b => other.rank === row.rank && b[0] === kind && b[1] === stage && b[2] === microbatch);
      const rect = document.getElementById(`b${number}-${same}`);
      if (same < 0 || !rect) continue;
      rect.classList.add("hot");
      hot.push(rect);
      if (other !== row) line(table, other.side, `${readable(other.boxes[same][3])}, for ${readable(other.boxes[same][4] - other.boxes[same][3])}`);
    }
  } else if (row.side !== "messages") {
    const before = row.boxes.filter(b => b[4] <= time).reduce((latest, b) => Math.max(latest, b[4]), 0);
    const after = row.boxes.filter(b => b[3] > time).reduce((first, b) => Math.min(first, b[3]), data.until);
    line(table, "bubble", `from ${readable(before)} for ${readable(after - before)}`);
  } else return;
  tip.replaceChildren(`rank ${row.rank}, ${row.side}`, table);
  tip.style.display = "block";
  const outer = chart.getBoundingClientRect(), left = event.clientX - outer.left;
  tip.style.left = (left + tip.offsetWidth + 16 > outer.width ? left - tip.offsetWidth - 14 : left + 14) + "px";
  tip.style.top = event.clientY - outer.top + 16 + "px";
}

function hide() {
  tip.style.display = "none";
  for (const rect of hot) rect.classList.remove("hot");
  hot = [];
}

function scale(factor, clientX) {
  const box = scroll.getBoundingClientRect(), offset = clientX === undefined ? box.width / 2 : clientX - box.left;
  const place = (scroll.scrollLeft + offset) / (box.width * zoom);
  zoom = factor ? Math.min(200, Math.max(1, zoom * factor)) : 1;
  layout();
  scroll.scrollLeft = place * box.width * zoom - offset;
}

svg.addEventListener("pointermove", show);
svg.addEventListener("pointerdown", show);
svg.addEventListener("pointerleave", hide);
scroll.addEventListener("wheel", event => {
  if (!event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  scale(2 ** (-event.deltaY / 200), event.clientX);
}, { passive: false });
for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => scale(Number(button.dataset.zoom)));
addEventListener("resize", layout);
layout();
