// What a person changed of the boxes that models found in one picture. Every change can be undone.

const MOST = 200; // changes that can be undone
const TOGETHER = 1000; // milliseconds within which equal steps are undone as one
let given = 0;

// A box is {id, domain, label, confidence, box: [x0, y0, x1, y1]} and is never changed itself.
export class Corrections {
  constructor() {
    this.found = []; // the models' boxes
    this.boxes = [];
    this.past = [];
    this.future = [];
    this.saved = this.boxes;
    this.last = { kind: null, at: 0 };
  }

  // Take in what a model found: [{label, confidence, box}].
  take(domain, detections) {
    const more = detections.map(({ label, confidence, box }) => ({ id: ++given, domain, label, confidence, box: [...box] }));
    this.found = [...this.found, ...more];
    this.boxes = this.saved = [...this.boxes, ...more];
  }

  change(boxes, kind = null) {
    const now = performance.now();
    const same = kind !== null && kind === this.last.kind && now - this.last.at < TOGETHER;
    this.last = { kind, at: now };
    if (!same) this.past.push(this.boxes);
    if (this.past.length > MOST) this.past.shift();
    this.future = [];
    this.boxes = boxes;
  }

  put(id, values, kind = null) {
    this.change(this.boxes.map((one) => (one.id === id ? { ...one, ...values } : one)), kind);
  }

  // Add a box that no model found; gives its id.
  add(domain, label, box) {
    const made = { id: ++given, domain, label, confidence: null, box };
    this.change([...this.boxes, made]);
    return made.id;
  }

  remove(id) {
    this.change(this.boxes.filter((one) => one.id !== id));
  }

  reset() {
    this.change(this.found);
  }

  undo() {
    this.step(this.past, this.future);
  }

  redo() {
    this.step(this.future, this.past);
  }

  step(from, to) {
    if (!from.length) return;
    to.push(this.boxes);
    this.boxes = from.pop();
    this.last = { kind: null, at: 0 };
  }

  get(id) {
    return this.boxes.find((one) => one.id === id);
  }

  // The model's box that a box was, if it was one.
  original(id) {
    return this.found.find((one) => one.id === id);
  }

  // "added", "moved", "relabelled", "moved, relabelled", or "" for the model's own.
  changeOf(one) {
    const before = this.original(one.id);
    if (!before) return "added";
    const changes = [];
    if (before.box.some((value, place) => value !== one.box[place])) changes.push("moved");
    if (before.label !== one.label || before.domain !== one.domain) changes.push("relabelled");
    return changes.join(", ");
  }

  get deleted() {
    return this.found.filter((one) => !this.get(one.id));
  }

  get changed() {
    return this.deleted.length > 0 || this.boxes.some((one) => this.changeOf(one));
  }

  get unsaved() {
    return this.changed && this.boxes !== this.saved;
  }
}
