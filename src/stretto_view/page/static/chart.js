// Charts: curves as columns, their looks, and a picture of one to save.

import { h, short } from "./dom.js";

export const COLORS = ["#1f77c9", "#d1495b", "#2a9d6f", "#c98a1b", "#8e5bc0", "#3a8f9e", "#a0643c", "#808080"];

// Curves as columns for uPlot, which has one x for all. Light lines are logged values, dark ones their moving mean.
export function columns(runs, curves, colors = COLORS) {
  const tables = curves.map((curve) => [curve.x, curve.y, curve.smooth]);
  const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const series = curves.flatMap((curve, at) => {
    const color = colors[at % colors.length];
    return [
      { label: runs[at], stroke: `${color}66`, width: 1, spanGaps: true, points: { show: curve.x.length < 3 } },
      { label: `${runs[at]}, mean`, stroke: color, width: 2, spanGaps: true, points: { show: false } },
    ];
  });
  return { data, series };
}

const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

export function options(place, series, label) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink-light").trim(), grid = style.getPropertyValue("--line").trim();
  const own = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
  return {
    width: Math.max(200, place.clientWidth || 400), height: 220, padding: [10, 12, 0, 0], legend: { show: false },
    scales: { x: { time: false } },
    cursor: { drag: { x: true, y: false }, sync: { key: "curves" } },
    series: [{ label: label }, ...series],
    axes: [{ ...own, ...(label === "version" ? { incrs: WHOLE } : {}), size: 30, space: 60, values: (plot, values) => values.map(short) }, { ...own, size: 56, values: (plot, values) => values.map(short) }],
  };
}

// Save a drawn chart as PNG, with its name and the names of its lines.
export function savePicture(plot, title, lines, colors = COLORS) {
  const source = plot.ctx.canvas, scale = devicePixelRatio || 1, line = 16 * scale;
  const style = getComputedStyle(document.documentElement), rows = Math.ceil(lines.length / 3);
  const canvas = h("canvas", { width: source.width, height: source.height + line * (2 + rows) });
  const brush = canvas.getContext("2d");
  brush.fillStyle = style.getPropertyValue("--ground").trim();
  brush.fillRect(0, 0, canvas.width, canvas.height);
  brush.font = `bold ${12 * scale}px system-ui`;
  brush.fillStyle = style.getPropertyValue("--ink").trim();
  brush.fillText(title, 8 * scale, line);
  brush.font = `${11 * scale}px system-ui`;
  lines.forEach((text, at) => {
    brush.fillStyle = colors[at % colors.length];
    brush.fillText(`■ ${text}`, 8 * scale + (at % 3) * (canvas.width / 3), line * (2.2 + Math.floor(at / 3)));
  });
  brush.drawImage(source, 0, line * (2 + rows));
  canvas.toBlob((blob) => {
    const address = URL.createObjectURL(blob);
    h("a", { href: address, download: `${title.replace(/[^\w.-]+/g, "-")}.png` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  });
}
