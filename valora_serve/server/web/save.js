// Saves the answers to all files, as they were corrected, in formats that other tools read.

import { zip } from "./zip.js";

// items: {name, width, height, answers: [{domain, detections | label | text …}], corrections}
export function save(format, items) {
  const made = { coco, yolo, labelstudio, csv }[format](items);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([made.content], { type: made.type }));
  link.download = made.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Classes of the boxes of all files; two domains may have the same label.
function classes(items) {
  const key = ({ domain, label }) => `${domain}\t${label}`;
  const pairs = new Map();
  for (const { corrections } of items) {
    for (const one of [...corrections.boxes, ...corrections.deleted]) pairs.set(key(one), one);
  }
  const listed = [...pairs.values()];
  const shared = (label) => listed.filter((one) => one.label === label).length > 1;
  const names = listed.map((one) => (shared(one.label) ? `${one.domain}/${one.label}` : one.label));
  const numbers = new Map([...pairs.keys()].map((name, place) => [name, place]));
  return { names, number: (one) => numbers.get(key(one)) };
}

// What was changed of a picture's boxes; null if nothing was.
function changes({ corrections }) {
  if (!corrections.changed) return null;
  const counts = { added: 0, moved: 0, relabelled: 0, deleted: corrections.deleted.length };
  for (const one of corrections.boxes) {
    for (const change of corrections.changeOf(one).split(", ")) if (change) counts[change] += 1;
  }
  return counts;
}

const corner = ([x0, y0, x1, y1]) => [x0, y0, x1 - x0, y1 - y0];

// A box that a person drew has no score; one that a person changed keeps the model's and says what was changed.
function coco(items) {
  const { names, number } = classes(items);
  const annotations = items.flatMap((item, place) => item.corrections.boxes.map((one) => {
    const bbox = corner(one.box);
    const change = item.corrections.changeOf(one);
    return {
      image_id: place + 1, category_id: number(one) + 1, bbox, area: bbox[2] * bbox[3], iscrowd: 0,
      ...(one.confidence === null ? {} : { score: one.confidence }),
      ...(change ? { attributes: { correction: change } } : {}),
    };
  })).map((one, place) => ({ id: place + 1, ...one }));
  const images = items.map((item, place) => {
    const counts = changes(item);
    const deleted = item.corrections.deleted.map((one) => ({ category_id: number(one) + 1, bbox: corner(one.box), score: one.confidence }));
    return {
      id: place + 1, file_name: item.name, width: item.width, height: item.height,
      ...(counts ? { corrections: counts, deleted } : {}),
    };
  });
  const categories = names.map((name, place) => ({ id: place + 1, name }));
  return json("predictions.coco.json", { images, categories, annotations });
}

// The model's answers are predictions; where a person corrected them, the corrected ones are an annotation, in
// which each region says where it is from.
function labelstudio(items) {
  return json("predictions.labelstudio.json", items.map((item) => {
    const { corrections } = item;
    const others = item.answers.filter((answer) => !answer.detections).flatMap(written);
    const task = {
      data: { image: `/data/local-files/?d=${item.name}` },
      predictions: [{ model_version: "VaLoRA", result: [...corrections.found.map((one) => region(item, one)), ...others] }],
    };
    if (corrections.changed) {
      task.annotations = [{
        result: [...corrections.boxes.map((one) => ({ ...region(item, one), origin: origin(corrections, one) })), ...others],
      }];
    }
    return task;
  }));
}

function origin(corrections, one) {
  const change = corrections.changeOf(one);
  if (change === "added") return "manual";
  return change ? "prediction-changed" : "prediction";
}

function region(item, { id, domain, label, confidence, box: [x0, y0, x1, y1] }) {
  return {
    id: `box-${id}`, to_name: "image", from_name: "label", type: "rectanglelabels", meta: { text: [domain] },
    ...(confidence === null ? {} : { score: confidence }),
    original_width: item.width, original_height: item.height, image_rotation: 0,
    value: {
      x: (100 * x0) / item.width, y: (100 * y0) / item.height, rotation: 0,
      width: (100 * (x1 - x0)) / item.width, height: (100 * (y1 - y0)) / item.height,
      rectanglelabels: [label],
    },
  };
}

function written(answer) {
  const common = { to_name: "image", meta: { text: [answer.domain] } };
  if (answer.label != null) {
    return [{ ...common, type: "choices", from_name: "choice", value: { choices: [answer.label] } }];
  }
  return [{ ...common, type: "textarea", from_name: "text", value: { text: [answer.text || ""] } }];
}

function csv(items) {
  const rows = [["file", "domain", "label", "confidence", "x0", "y0", "x1", "y1", "text", "correction"]];
  for (const { name, answers, corrections } of items) {
    const row = (one, change) => rows.push([name, one.domain, one.label, one.confidence ?? "", ...one.box, "", change]);
    for (const one of corrections.boxes) row(one, corrections.changeOf(one));
    for (const one of corrections.deleted) row(one, "deleted");
    for (const answer of answers.filter((other) => !other.detections)) {
      rows.push([name, answer.domain, answer.label ?? "", answer.confidence ?? "", "", "", "", "", answer.text ?? "", ""]);
    }
  }
  const content = rows.map((row) => row.map(cell).join(",")).join("\n");
  return { name: "predictions.csv", type: "text/csv", content: `${content}\n` };
}

function cell(value) {
  let text = String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`; // no formulas
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// Label files have no room for more than boxes: what was changed is in a file beside them.
function yolo(items) {
  const { names, number } = classes(items);
  const used = new Set();
  const changed = {};
  const files = items.map((item) => {
    const rows = item.corrections.boxes.map((one) => {
      const [x0, y0, x1, y1] = one.box;
      const place = [(x0 + x1) / 2 / item.width, (y0 + y1) / 2 / item.height, (x1 - x0) / item.width, (y1 - y0) / item.height];
      return `${number(one)} ${place.map((value) => value.toFixed(8)).join(" ")}\n`;
    });
    const stem = item.name.replace(/\.[^.]*$/, "");
    let name = stem;
    for (let more = 2; used.has(name); more += 1) name = `${stem}-${more}`; // files of several folders may share a name
    used.add(name);
    const counts = changes(item);
    if (counts) changed[`labels/${name}.txt`] = { ...counts, rows: item.corrections.boxes.map((one) => item.corrections.changeOf(one)) };
    return [`labels/${name}.txt`, rows.join("")];
  });
  const listed = names.map((name, place) => `  ${place}: ${JSON.stringify(name)}\n`).join("");
  files.push(["data.yaml", `path: .\ntrain: images\nval: images\nnames:\n${listed}`]);
  if (Object.keys(changed).length) files.push(["corrections.json", `${JSON.stringify(changed, null, 1)}\n`]);
  return { name: "predictions-yolo.zip", type: "application/zip", content: zip(files) };
}

function json(name, value) {
  return { name, type: "application/json", content: `${JSON.stringify(value)}\n` };
}
