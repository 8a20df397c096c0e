// Charts over time, as SVG that stretches with the page.

import { SVG } from "./api.js";

const HIGH = 100; // units of a chart's height; its width is its span in seconds
const GAP = 3.5; // seconds without a sample from which nothing is drawn

function path(points, name) {
  const made = document.createElementNS(SVG, "path");
  made.setAttribute("d", points);
  made.setAttribute("class", name);
  return made;
}

// Runs of samples without a gap between them.
function runs(samples) {
  const found = [];
  for (const sample of samples) {
    const last = found.at(-1);
    if (last && sample.at - last.at(-1).at <= GAP * 1000) last.push(sample);
    else found.push([sample]);
  }
  return found;
}

// Areas one on another. series: [[class, sample => value]], the lowest first; gives the top of the scale.
export function stacked(chart, samples, span, series) {
  const end = samples.length ? samples.at(-1).at : 0;
  const x = (sample) => (span - (end - sample.at) / 1000).toFixed(2);
  const all = (sample) => series.reduce((sum, [, value]) => sum + value(sample), 0);
  const top = scaleTop(Math.max(0, ...samples.map(all)));
  const y = (value) => (HIGH - (HIGH * value) / top).toFixed(2);
  chart.setAttribute("viewBox", `0 0 ${span} ${HIGH}`);
  const parts = runs(samples).flatMap((run) => {
    let below = run.map(() => 0);
    return series.map(([name, value]) => {
      const above = run.map((sample, place) => below[place] + value(sample));
      const there = run.map((sample, place) => `${x(sample)} ${y(above[place])}`);
      const back = run.map((sample, place) => `${x(sample)} ${y(below[place])}`).reverse();
      below = above;
      return path(`M${there.join("L")}L${back.join("L")}Z`, name);
    });
  });
  chart.replaceChildren(...parts);
  return top;
}

// What held when, as a band of colours, and a mark wherever something was counted. kind(sample) is a class.
export function band(chart, samples, span, kind, counted) {
  const end = samples.length ? samples.at(-1).at : 0;
  const x = (sample) => span - (end - sample.at) / 1000;
  chart.setAttribute("viewBox", `0 0 ${span} ${HIGH}`);
  const parts = [];
  for (const run of runs(samples)) {
    run.forEach((sample, place) => {
      const from = place ? x(run[place - 1]) : x(sample) - 1;
      const last = parts.at(-1);
      if (place && last.kind === kind(sample)) last.to = x(sample);
      else parts.push({ kind: kind(sample), from, to: x(sample) });
    });
  }
  const drawn = parts.map(({ kind: name, from, to }) => path(`M${from.toFixed(2)} 30H${to.toFixed(2)}V${HIGH}H${from.toFixed(2)}Z`, name));
  const marks = samples.filter((sample, place) => place && counted(sample) > counted(samples[place - 1]));
  drawn.push(path(marks.map((sample) => `M${x(sample).toFixed(2)} 0V30`).join("") || "M0 0", "mark"));
  chart.replaceChildren(...drawn);
}

// The least of 1, 2, 5, 10, … that a value fits below.
export function scaleTop(value) {
  for (let ten = 1; ; ten *= 10) {
    for (const step of [1, 2, 5]) if (value <= step * ten) return step * ten;
  }
}
