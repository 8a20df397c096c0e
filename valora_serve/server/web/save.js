// Saves the answers to all files in formats that other tools read.

// items: {name, width, height, answers: [{domain, detections | label | text …}]}
export function save(format, items) {
  const made = { coco, yolo, labelstudio, csv }[format](items);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([made.content], { type: made.type }));
  link.download = made.name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function* boxes(items) {
  for (const item of items) {
    for (const answer of item.answers) {
      for (const found of answer.detections || []) yield { item, domain: answer.domain, ...found };
    }
  }
}

// Numbers of the classes of all domains; two domains may have the same label.
function classes(items) {
  const pairs = new Map();
  for (const found of boxes(items)) pairs.set(`${found.domain}\t${found.label}`, found);
  const listed = [...pairs.values()];
  const shared = (label) => listed.filter((found) => found.label === label).length > 1;
  const names = listed.map((found) => (shared(found.label) ? `${found.domain}/${found.label}` : found.label));
  return { names, number: new Map([...pairs.keys()].map((key, place) => [key, place])) };
}

function coco(items) {
  const { names, number } = classes(items);
  const ids = new Map(items.map((item, place) => [item, place + 1]));
  const annotations = [...boxes(items)].map((found, place) => {
    const [x0, y0, x1, y1] = found.box;
    return {
      id: place + 1, image_id: ids.get(found.item),
      category_id: number.get(`${found.domain}\t${found.label}`) + 1,
      bbox: [x0, y0, x1 - x0, y1 - y0], area: (x1 - x0) * (y1 - y0), iscrowd: 0,
      score: found.confidence,
    };
  });
  const images = items.map((item) => ({
    id: ids.get(item), file_name: item.name, width: item.width, height: item.height,
  }));
  const categories = names.map((name, place) => ({ id: place + 1, name }));
  return json("predictions.coco.json", { images, categories, annotations });
}

function labelstudio(items) {
  return json("predictions.labelstudio.json", items.map((item) => ({
    data: { image: `/data/local-files/?d=${item.name}` },
    predictions: [{ model_version: "VaLoRA", result: item.answers.flatMap((answer) => results(item, answer)) }],
  })));
}

function results(item, answer) {
  const common = { to_name: "image", meta: { text: [answer.domain] } };
  if (answer.detections) {
    return answer.detections.map((found) => {
      const [x0, y0, x1, y1] = found.box;
      return {
        ...common, type: "rectanglelabels", from_name: "label", score: found.confidence,
        original_width: item.width, original_height: item.height, image_rotation: 0,
        value: {
          x: (100 * x0) / item.width, y: (100 * y0) / item.height, rotation: 0,
          width: (100 * (x1 - x0)) / item.width, height: (100 * (y1 - y0)) / item.height,
          rectanglelabels: [found.label],
        },
      };
    });
  }
  if (answer.label != null) {
    return [{ ...common, type: "choices", from_name: "choice", value: { choices: [answer.label] } }];
  }
  return [{ ...common, type: "textarea", from_name: "text", value: { text: [answer.text || ""] } }];
}

function csv(items) {
  const rows = [["file", "domain", "label", "confidence", "x0", "y0", "x1", "y1", "text"]];
  for (const item of items) {
    for (const answer of item.answers) {
      if (answer.detections) {
        for (const found of answer.detections) {
          rows.push([item.name, answer.domain, found.label, found.confidence, ...found.box, ""]);
        }
      } else {
        rows.push([item.name, answer.domain, answer.label ?? "", answer.confidence ?? "", "", "", "", "", answer.text ?? ""]);
      }
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

function yolo(items) {
  const { names, number } = classes(items);
  const files = items.map((item) => {
    const rows = [...boxes([item])].map((found) => {
      const [x0, y0, x1, y1] = found.box;
      const place = [(x0 + x1) / 2 / item.width, (y0 + y1) / 2 / item.height, (x1 - x0) / item.width, (y1 - y0) / item.height];
      return `${number.get(`${found.domain}\t${found.label}`)} ${place.map((value) => value.toFixed(8)).join(" ")}\n`;
    });
    return [`labels/${item.name.replace(/\.[^.]*$/, "")}.txt`, rows.join("")];
  });
  const listed = names.map((name, place) => `  ${place}: ${JSON.stringify(name)}\n`).join("");
  files.push(["data.yaml", `path: .\ntrain: images\nval: images\nnames:\n${listed}`]);
  return { name: "predictions-yolo.zip", type: "application/zip", content: zip(files) };
}

function json(name, value) {
  return { name, type: "application/json", content: `${JSON.stringify(value)}\n` };
}

// A zip archive whose files are stored as they are (APPNOTE 6.3.10, sections 4.3.7 to 4.3.16).
export function zip(files) {
  const text = new TextEncoder();
  const parts = [];
  const listed = [];
  let at = 0;
  for (const [name, content] of files) {
    const title = text.encode(name);
    const data = text.encode(content);
    const common = [u16(20), u16(0x0800), u16(0), u16(0), u16(0x21), u32(crc(data)), u32(data.length), u32(data.length), u16(title.length), u16(0)];
    const head = [u32(0x04034b50), ...common, title];
    listed.push([u32(0x02014b50), u16(20), ...common, u16(0), u16(0), u16(0), u32(0), u32(at), title]);
    parts.push(...head, data);
    at += size(head) + data.length;
  }
  const ends = listed.flat();
  const end = [u32(0x06054b50), u16(0), u16(0), u16(files.length), u16(files.length), u32(size(ends)), u32(at), u16(0)];
  return new Blob([...parts, ...ends, ...end]);
}

const size = (parts) => parts.reduce((sum, part) => sum + part.length, 0);
const u16 = (value) => new Uint8Array([value & 255, value >> 8]);
const u32 = (value) => new Uint8Array([value, value >>> 8, value >>> 16, value >>> 24]);

function crc(data) {
  let value = ~0;
  for (const byte of data) {
    value ^= byte;
    for (let bit = 0; bit < 8; bit += 1) value = (value >>> 1) ^ (value & 1 ? 0xedb88320 : 0);
  }
  return ~value >>> 0;
}
