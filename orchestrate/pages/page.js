// Of charts: exact values under the pointer, zoom by dragging, curves that can be hidden. Of tables: order by a column.
const closest = (points, x) => points.reduce((best, point, i) => Math.abs(point[0] - x) < Math.abs(points[best][0] - x) ? i : best, 0);
const text = value => Math.abs(value) >= 1000 && Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(4));

// The curves of a figure: each with its label, values, and the points of its path. They are read once.
const known = new WeakMap();
const read = figure => JSON.parse(figure.dataset.curves).map((curve, i) => {
  const path = figure.querySelectorAll(".series path.line")[i];
  const numbers = path ? path.getAttribute("d").match(/-?[\d.]+(?:e[-+]?\d+)?/g).map(Number) : [];
  const drawn = curve.points.map((_, at) => [numbers[2 * at], numbers[2 * at + 1]]);
  return { ...curve, path, drawn };
}).filter(curve => curve.path);
// Those that are visible.
const curvesOf = figure => {
  if (!known.has(figure)) known.set(figure, read(figure));
  return known.get(figure).filter(curve => curve.path.parentNode.style.display !== "none");
};

const at = (event, path) => new DOMPoint(event.clientX, event.clientY).matrixTransform(path.getScreenCTM().inverse()).x;

document.addEventListener("pointermove", event => {
  const figure = event.target.closest("figure[data-curves]");
  if (!figure) return;
  const found = curvesOf(figure);
  if (!found.length) return;
  const x = at(event, found[0].path);
  const values = found.map(curve => [curve, curve.points[closest(curve.drawn, x)]]);
  const words = values.map(([curve, point]) => `${curve.label} ${text(point[1])}`);
  figure.querySelector("output").textContent = `${figure.dataset.axis} ${text(values[0][1][0])}: ${words.join(", ")}`;
});

// Hide what a curve has outside of a rectangle.
const clip = (element, { x, y, width, height }) => {
  const [area, rect] = ["clipPath", "rect"].map(name => document.createElementNS("http://www.w3.org/2000/svg", name));
  for (const [name, value] of Object.entries({ x, y, width, height })) rect.setAttribute(name, value);
  area.id = `clip-${document.querySelectorAll("clipPath").length}`;
  area.append(rect);
  element.append(area);
  element.setAttribute("clip-path", `url(#${area.id})`);
};

let from = null;
document.addEventListener("pointerdown", event => {
  const figure = event.target.closest("figure[data-curves]"), [curve] = figure ? curvesOf(figure) : [];
  from = curve && !event.target.closest(".legend") ? { figure, x: at(event, curve.path) } : null;
});
document.addEventListener("pointerup", event => {
  const { figure, x: start } = from || {}, found = figure ? curvesOf(figure) : [];
  from = null;
  if (!found.length) return;
  const [low, high] = [start, at(event, found[0].path)].sort((a, b) => a - b);
  const inside = found.flatMap(curve => curve.drawn.map((point, i) => [point, curve.points[i]])).filter(([[x]]) => x >= low && x <= high);
  if (high - low < 8 || inside.length < 2) return;
  const span = values => [Math.min(...values), Math.max(...values)];
  const plot = figure.querySelector(".plot .background").getBBox();
  const [left, right] = span(inside.map(([[x]]) => x)), [top, bottom] = span(inside.map(([[, y]]) => y));
  const a = plot.width / (right - left || 1), d = bottom > top ? plot.height / (bottom - top) : 1;
  for (const { path } of found) {
    clip(path.parentNode, plot);
    path.setAttribute("transform", `matrix(${a} 0 0 ${d} ${plot.x - a * left} ${plot.y - d * top})`);
  }
  figure.classList.add("zoomed");
  const [x1, x2] = span(inside.map(([, [x]]) => x)), [y1, y2] = span(inside.map(([, [, y]]) => y));
  figure.querySelector("output").textContent = `${figure.dataset.axis} ${text(x1)} to ${text(x2)}: ${text(y1)} to ${text(y2)}`;
});
document.addEventListener("dblclick", event => {
  const figure = event.target.closest("figure[data-curves]");
  if (!figure) return;
  figure.classList.remove("zoomed");
  figure.querySelectorAll("path.line").forEach(path => path.removeAttribute("transform"));
  figure.querySelectorAll("clipPath").forEach(area => { area.parentNode.removeAttribute("clip-path"); area.remove(); });
  getSelection().removeAllRanges();
});

document.addEventListener("click", event => {
  const legend = event.target.closest("figure .legends .legend");
  if (legend) {
    const all = legend.closest(".legends").querySelectorAll(".legend");
    const series = legend.closest("figure").querySelectorAll(".plot .series")[[...all].indexOf(legend)];
    series.style.display = series.style.display ? "" : "none";
    legend.style.opacity = series.style.display ? .4 : 1;
  }
  const head = event.target.closest("table.sorts thead th");
  if (head) {
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    const key = row => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
    const order = (a, b) => isNaN(a) || isNaN(b) || a === "" || b === "" ? String(a).localeCompare(b) : a - b;
    [...body.rows].sort((a, b) => (up ? 1 : -1) * order(key(a), key(b))).forEach(row => body.append(row));
    head.closest("tr").querySelectorAll("th").forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
  }
});
