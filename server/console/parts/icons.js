// Icons, drawn as strokes in a field of 24 by 24.
import { svg } from "./dom.js";

const PATHS = {
  menu: ["M4 7h16M4 12h16M4 17h16"],
  settings: ["M4 8h10M18 8h2M4 16h2M10 16h10", "M16 6v4M8 14v4"],
  branches: ["M7 5v14", "M7 12h4a4 4 0 0 0 4-4V6", "M15 6l2-2 2 2M5 5h4"],
  server: ["M5 5h5v5H5zM14 5h5v5h-5zM5 14h5v5H5zM14 14h5v5h-5z"],
  more: ["M5 11.2a.8.8 0 1 0 .01 0zM12 11.2a.8.8 0 1 0 .01 0zM19 11.2a.8.8 0 1 0 .01 0z"],
  send: ["M12 19V5M6 11l6-6 6 6"],
  stop: ["M8 8h8v8H8z"],
  copy: ["M9 9h10v10H9z", "M15 9V5H5v10h4"],
  again: ["M19 12a7 7 0 1 1-2-5", "M19 4v4h-4"],
  edit: ["M5 19l1-4 9-9 3 3-9 9z"],
  reply: ["M9 7l-5 5 5 5", "M4 12h9a7 7 0 0 1 7 7"],
  tokens: ["M4 7h6v4H4zM13 7h7v4h-7zM4 14h9v4H4z"],
  close: ["M6 6l12 12M18 6L6 18"],
  widen: ["M14 5h5v5M10 19H5v-5M19 5l-6 6M5 19l6-6"],
  left: ["M14 6l-6 6 6 6"],
  right: ["M10 6l6 6-6 6"],
  attach: ["M18 11l-6.5 6.5a3.5 3.5 0 0 1-5-5L13 6a2.4 2.4 0 0 1 3.4 3.4L10 16"],
  bin: ["M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13"],
  save: ["M12 4v11M7 11l5 5 5-5M5 20h14"],
  go: ["M7 5l11 7-11 7z"],
};

export function icon(name) {
  const paths = PATHS[name].map((d) => svg("path", { d }));
  return svg("svg", { viewBox: "0 0 24 24", class: "drawn", "aria-hidden": "true" }, ...paths);
}
