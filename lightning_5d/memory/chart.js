const chart = document.querySelector(".chart"), svg = chart.querySelector("svg");
const cursor = chart.querySelector(".cursor"), tip = chart.querySelector(".tip");

function readable(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (Math.abs(bytes) >= 1024 && power < units.length - 1) { bytes /= 1024; power += 1; }
  return bytes.toFixed(power ? 2 : 0) + " " + units[power];
}

function nearest(x) {
  let low = 0, high = data.x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.x[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - data.x[low - 1] < data.x[low] - x ? low - 1 : low;
}

function row(label, value, colour) {
  const line = document.createElement("tr"), left = document.createElement("td"), right = document.createElement("td");
  if (colour) {
    const mark = document.createElement("i");
    mark.style.background = colour;
    left.append(mark);
  }
  left.append(label);
  right.append(value);
  line.append(left, right);
  return line;
}

function show(event) {
  const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
  const index = nearest((event.clientX - box.left) * scale), x = data.x[index];
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  cursor.style.visibility = "visible";
  const table = document.createElement("table");
  let total = 0;
  for (const [name, values] of Object.entries(data.bands).reverse()) {
    total += values[index];
    if (values[index]) table.append(row(name, readable(values[index]), data.colours[name]));
  }
  table.append(row("total", readable(total)));
  tip.replaceChildren(`${data.where[index]}, after ${data.time[index].toFixed(3)} s`, table);
  tip.style.display = "block";
  const left = x / scale;
  tip.style.left = (left + tip.offsetWidth + 24 > box.width ? left - tip.offsetWidth - 12 : left + 12) + "px";
  tip.style.top = "28px";
}

function hide() {
  cursor.style.visibility = "hidden";
  tip.style.display = "none";
}

if (data) {
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
}
