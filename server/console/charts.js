// Moving plots, the map of blocks, and arithmetic on histograms. Nothing here knows of HTTP.
const COLOURS = ["#4f9df7", "#b98cf5", "#5fc98c", "#f2b14c"];
const KINDS = ["#27303a", "#4f9df7", "#b98cf5", "#f2b14c"]; // as in style.css
const POINTS = 120;

// What a cumulative histogram gained since an earlier one.
export function sinceLast(now, before) {
  return { bounds: now.bounds, counts: now.counts.map((count, i) => count - before.counts[i]) };
}

// The upper bounds of the buckets that hold these parts of all observations; null where there are none.
export function quantiles(histogram, parts) {
  const total = histogram.counts.reduce((sum, count) => sum + count, 0);
  return parts.map((part) => {
    let seen = 0;
    for (let i = 0; total > 0 && i < histogram.counts.length; i++) {
      seen += histogram.counts[i];
      if (seen >= part * total) return histogram.bounds[Math.min(i, histogram.bounds.length - 1)];
    }
    return null;
  });
}

// Draws in the size that the canvas has on the page, sharply.
function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen, width, height };
}

export class Plot {
  constructor(canvas, names) {
    this.canvas = canvas;
    this.names = names;
    this.points = [];
  }

  // One value per line; null leaves a gap.
  add(values) {
    this.points.push(values);
    if (this.points.length > POINTS) this.points.shift();
    this.draw();
  }

  draw() {
    const { pen, width, height } = prepare(this.canvas);
    const most = Math.max(1, ...this.points.flat().filter((value) => value !== null)) * 1.1;
    const top = 16;
    const y = (value) => height - (value / most) * (height - top);
    pen.font = "10px sans-serif";
    this.names.forEach((name, line) => {
      pen.strokeStyle = pen.fillStyle = COLOURS[line];
      const newest = this.points.at(-1)?.[line];
      pen.fillText(`${name} ${newest == null ? "–" : newest.toPrecision(3)}`, 6 + (line * width) / this.names.length, 11);
      pen.beginPath();
      let drawing = false;
      this.points.forEach((values, i) => {
        const value = values[line];
        if (value === null) { drawing = false; return; }
        const x = width - ((this.points.length - 1 - i) * width) / (POINTS - 1);
        if (drawing) pen.lineTo(x, y(value)); else pen.moveTo(x, y(value));
        drawing = true;
      });
      pen.stroke();
    });
  }
}

export class BlockMap {
  constructor(canvas) {
    this.canvas = canvas;
  }

  // Each field has `cells`, a digit per block (or per several, where there are too many to show).
  draw(device, host) {
    const { pen, width, height } = prepare(this.canvas);
    const share = host.cells.length ? Math.min(0.5, host.cells.length / (host.cells.length + device.cells.length)) : 0;
    const split = Math.round(width * (1 - Math.max(share, host.cells.length ? 0.2 : 0)));
    this.field(pen, device.cells, 0, split - 8, height);
    this.field(pen, host.cells, split, width - split, height);
  }

  field(pen, cells, left, width, height) {
    if (!cells.length || width <= 0) return;
    const side = Math.max(1, Math.floor(Math.sqrt((width * height) / cells.length)));
    const columns = Math.max(1, Math.floor(width / side));
    const gap = side > 3 ? 1 : 0;
    for (let i = 0; i < cells.length; i++) {
      pen.fillStyle = KINDS[cells[i]];
      pen.fillRect(left + (i % columns) * side, Math.floor(i / columns) * side, side - gap, side - gap);
    }
  }
}
