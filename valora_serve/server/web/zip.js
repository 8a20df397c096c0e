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
